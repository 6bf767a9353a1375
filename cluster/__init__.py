"""Binds the services into a mesh on Ray, starts it and speaks for it on the command line; nothing below imports Ray."""
