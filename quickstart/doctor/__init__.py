"""What is checked before anything heavy starts. Reads files and versions; loads no weights, builds no model."""
