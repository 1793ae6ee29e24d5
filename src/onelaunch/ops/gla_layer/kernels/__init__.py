"""CUDA C++ of the variant ``one_launch``: a whole layer in one cooperative launch, for few rows.

``step.cu`` is the entry and describes the design. ``ring.cuh`` has the layout of shared memory, the ring of weight chunks and
waits that time out, and ``product.cuh`` the matrix products. ``recurrence.cuh`` has the decays and the state of a CTA with some
value channels of all sequences, ``sequences.cuh`` those of a CTA with whole sequences, and ``way_out.cuh`` the norm, the gate and
the output projection. ``machine.cuh`` of ``onelaunch.cuda`` wraps what the hardware does, so that tests can
run these files on a CPU. ``configure_step.py`` of the folder above generates ``sizes.cuh`` and gives the files to the compiler.
"""
