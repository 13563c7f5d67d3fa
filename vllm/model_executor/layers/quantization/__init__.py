"""How the weights of each format are loaded."""
