"""The fast backend: one compact decoder for Llama-like models, on kernels of its own where there is a C++ compiler."""
