import re
G = [
 ("g1", r"^native/"),
 ("g2", r"^(infer\.py|model\.py|cache\.py|sampling\.py|infer_speculative\.py|drafts\.py|errors\.py)$"),
 ("g3", r"^(engine/|infer_engine\.py)"),
 ("g4", r"^server/(protocol|served|chat_completions|completions|answers|app|structured_output|responses\w*|limits|auth|sse)\w*\.py"),
 ("g5", r"^(server/|serve|command_line/)"),
 ("g6", r"^(text/|loading/(load|config|chat_template|checkpoint|tokenizer\w*|interrupt|__init__)\.py|constraints/)"),
 ("g7", r"^(loading/|parallel/|quantisation/|llama\.py|gemma\.py|adapters\.py|benchmark|checkpoints/|examples/)"),
 ("g8", r"^tests/"),
]
def group(path):
    for n, r in G:
        if re.search(r, path): return n
    return "g7"
