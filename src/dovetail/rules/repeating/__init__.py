"""How blocks that occur again and again are found from the dataflow alone."""
