"""Greedy decoding by `transformers`, a request to a line of standard input, timed here.

python transformers_generating.py DIR
{"prompts": [[…], …], "new_tokens": N}  ->  {"seconds": …, "tokens": [[…], …]}
"""

import json
import sys
import time

import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, local_files_only=True
).eval()
# Nothing ends a text before its time.
model.generation_config.eos_token_id = None
print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    prompts = torch.tensor(request["prompts"])
    began = time.perf_counter()
    with torch.inference_mode():
        texts = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=request["new_tokens"],
            do_sample=False,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "tokens": texts[:, prompts.shape[1] :].tolist()}), flush=True)
