"""The backends that come with dovetail, each in a file of its own and imported when it is asked for."""
