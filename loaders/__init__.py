"""Data: preparing corpora, and loading rows from them.

Preparation: inputs -> readers -> records -> shard_work (tokenizers, token_writer) -> prepare; also train_tokenizer.
Loading: manifest -> token_reader -> rows -> loader. Both use token_record, the format of one stored record.
"""
