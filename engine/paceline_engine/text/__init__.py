"""From tokens to text, piece by piece."""
