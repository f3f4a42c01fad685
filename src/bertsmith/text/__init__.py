"""Text in, token ids out; vocabularies; files of any kind into documents or rows. No torch.

In: strings and files. Out: ids, words, documents, rows. Start: `tokenizer/wordpiece.py`.
"""
