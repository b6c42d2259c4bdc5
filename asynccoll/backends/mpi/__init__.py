"""MPI through mpi4py: MPICH, Open MPI and their derivatives."""
