"""MPI, by mpi4py: MPICH, Open MPI and their kin."""
