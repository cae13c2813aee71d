"""`engramd doctor`: what of this machine will keep engramd from serving, or from serving well, and the way out."""
