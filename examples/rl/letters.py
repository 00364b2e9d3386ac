"""Policy updates with a rule-based reward: completions learn to consist of letters. Small enough for two CPU cores.

    ridge train configs/quickstart.yaml        # the model to start from
    python examples/rl/letters.py

The reward is the share of letters among the characters of a completion. The model samples its own completions here; with an inference
server, send the prompts to it and let it load weights/latest after each `export`.
"""

from __future__ import annotations

import sys

import ridgeline

PROMPTS = ("def ", "import ", "class ", "return ")
PER_PROMPT = 8
"""Completions of a prompt: a group, within which rewards are compared."""


def reward(text: str) -> float:
    """Return the share of letters among the characters of a text, 0 to 1."""
    return sum(character.isascii() and character.isalpha() for character in text) / max(1, len(text))


def improve(config: ridgeline.Config, updates: int, weights: str, max_tokens: int = 24) -> list[float]:
    """Update a model until `updates` are done, those before a resume included; return the mean rewards."""
    rewards = []
    with ridgeline.open_policy(config) as policy:
        prompts = [ids for ids in policy.tokenizer.encode_batch(PROMPTS) for _ in range(PER_PROMPT)]
        groups = [text for text in PROMPTS for _ in range(PER_PROMPT)]
        while policy.updates < updates:
            completions = policy.sample(prompts, max_tokens=max_tokens, seed=policy.updates)
            values = [reward(policy.tokenizer.decode(tokens)) for tokens in completions]
            rollouts = [ridgeline.Rollout(*one) for one in zip(prompts, completions, values, groups, strict=True)]
            metrics = policy.update(rollouts)
            policy.export(weights)
            rewards.append(metrics["train_policy/reward"])
            print(f"update {policy.updates}: reward {rewards[-1]:.3f}, loss {metrics['train/loss']:.4f}", flush=True)
    return rewards


if __name__ == "__main__":
    improve(ridgeline.load_config("configs/examples/grpo-tiny.yaml", sys.argv[1:]), updates=30, weights="runs/grpo-tiny/weights")
