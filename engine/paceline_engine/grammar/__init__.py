"""Output that keeps to a JSON schema, a regular expression or a list of texts."""
