# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""First-fit decreasing in O(n log n): a max-tree over the free room of the bins finds the first bin that fits."""

import numpy as np

from libc.stdint cimport int64_t


def first_fit_decreasing(const int64_t[::1] lengths, int64_t budget):
    """Pack sequences into bins of at most ``budget`` tokens; a sequence longer than the budget gets a bin of its own.

    lengths: [n] int64, budget > 0. Returns ([n] int64 bin of each sequence, number of bins). Equal lengths keep their order, so the
    answer depends on the lengths alone.
    """
    cdef Py_ssize_t n = lengths.shape[0], i, node, size = 1, bins = 0, item
    cdef int64_t length
    if budget <= 0:
        raise ValueError(f"budget must be positive, got {budget}")
    order_array = np.argsort(-np.asarray(lengths), kind="stable")
    bin_array = np.empty(n, dtype=np.int64)
    cdef const int64_t[::1] order = order_array.astype(np.int64, copy=False)
    cdef int64_t[::1] bin_of = bin_array
    while size < n:
        size *= 2
    room_array = np.full(2 * size, budget, dtype=np.int64)  # leaf size + b: room of bin b, opened or not
    cdef int64_t[::1] room = room_array
    with nogil:
        for i in range(n):
            item = order[i]
            length = lengths[item]
            if length >= budget:  # never shares: first leaf still untouched
                length = budget
            node = 1
            while node < size:
                node = 2 * node if room[2 * node] >= length else 2 * node + 1
            bin_of[item] = node - size
            if node - size + 1 > bins:
                bins = node - size + 1
            room[node] -= length
            node //= 2
            while node >= 1:
                room[node] = max(room[2 * node], room[2 * node + 1])
                node //= 2
    return bin_array, bins
