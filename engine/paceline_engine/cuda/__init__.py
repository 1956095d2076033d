"""What the decoder runs on CUDA: tensor-core products, fused attention and captured decode steps.

Everything here is made of torch operators, so the same code runs on CPU tensors, where it is tested against
the native kernels. What a device cannot do, or does wrong, ``support`` finds out by trying it.
"""
