"""A run of each export layout, with options that make it write several files where it can."""

LAYOUTS = [
    ("specforge", {"algorithm": "eagle3", "compress": True}),
    ("deepspec", {"shard_size": 2}),
    ("modelopt", {}),
    ("automodel-dspark", {"shard_size": 2}),
    ("automodel-eagle3", {"shard_size": 2, "draft_vocab_size": 30}),
    ("angelslim", {"algorithm": "dflash"}),
    ("eagle1", {}),
]
