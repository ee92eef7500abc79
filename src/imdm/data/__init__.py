"""Training and evaluation data: enumerated languages, token files, text, couplings.

Nothing is imported here, so that the processes that tokenise need no torch.
"""
