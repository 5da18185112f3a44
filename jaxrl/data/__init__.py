"""Problems and prompts: the synthetic task, problem files, tokenizers, templates and padding."""
