"""The mixture of experts of a block: router, dispatch of tokens to experts, grouped matmuls."""
