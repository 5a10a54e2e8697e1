"""Between text and token ids: tokenizer, chat templates, the checks of a request, the text of an output."""
