"""Checkpoints as Hugging Face lays them out: `config.json` and safetensors files."""
