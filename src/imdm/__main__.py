"""`python -m imdm`, and `torchrun --nproc_per_node 2 -m imdm train …`."""

from imdm.cli import main

main()
