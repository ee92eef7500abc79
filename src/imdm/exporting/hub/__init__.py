"""Where the code of a folder for plain `transformers` begins: `exporting.copying` copies these modules, and all that
they import, beside the weights."""
