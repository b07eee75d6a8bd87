"""Kernels of `fortified` for CUDA devices, in Triton. Each file stands beside the plain code of the same name.

`first_tests`      which uploads pass the first tests
`directions`       where uploads and examples lie along the directions, in five launches; it launches those of
`moments`          the moments of the server's examples along each direction, and
`main_difference`  one step of power iteration
`standing`         evidence, trust and offsets of one worker in one program
`trust`            the agreement of the best workers
`copies`           who copies whom, and how often the rest is repeated
`doubt`            the doubt that is left about each worker
`weights`          everyone's weight, and the reason of those that have none

Every kernel gives what its plain twin gives. The constants are those of the plain code, as `tl.constexpr`.

Nothing is added atomically, so a rerun gives the same bytes. Nothing waits for the device and no shape depends on
a value: a round can be recorded as a CUDA graph. All tensors are contiguous, float32 unless stated, and on one device.
Tensors of bool are read and written as bytes. In an expression, a constant stands to the right of a tensor: Triton's
interpreter needs that.
"""
