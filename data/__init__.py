"""Sources, labels, shards, views and loading of demonstrations."""
