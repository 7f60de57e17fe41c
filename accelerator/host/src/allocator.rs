//! Settings of glibc's allocator for training.
//!
//! A training step allocates and frees the same large blocks again and again. By default, glibc gives them back to the
//! system, and the kernel zeroes them again each time. This takes 10 to 15 percent of the time of one training process,
//! and 20 to 25 percent if two train at the same time, since they wait for each other in the kernel. With these settings,
//! glibc keeps the blocks. Peak memory grows by less than 10 percent.

/// The environment variables that hold these settings. glibc reads them when a process starts. The last one requests
/// huge pages, which the system must offer on request.
pub const ALLOCATOR_VARIABLES: [(&str, &str); 4] = [
    ("MALLOC_MMAP_THRESHOLD_", "4294967296"),
    ("MALLOC_TOP_PAD_", "67108864"),
    ("MALLOC_TRIM_THRESHOLD_", "4294967296"),
    ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
];

/// Applies these settings, except huge pages, to the running process. Does nothing if one of the variables has another
/// value, or if the C library is not glibc.
///
/// Earlier versions of glibc refuse a threshold of more than 32 MiB for blocks that are mapped, also from the variable. With
/// them, the threshold is 32 MiB.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        static ONCE: std::sync::Once = std::sync::Once::new();
        let differs = |(name, ours): &(&str, &str)| {
            let value = std::env::var_os(name).filter(|value| value != ours);
            value.is_some_and(|value| {
                // Other tunables have nothing to do with the allocator.
                !name.starts_with("GLIBC") || value.to_string_lossy().contains("glibc.malloc.")
            })
        };
        ONCE.call_once(|| {
            if !ALLOCATOR_VARIABLES.iter().any(differs) {
                glibc::keep_freed_memory();
            }
        });
    }
}

/// Gives the memory that is free at the moment back to the system. Does nothing if the C library is not glibc.
pub fn give_back_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::give_back_freed_memory();
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "functions of the C library")]
mod glibc {
    pub(super) fn give_back_freed_memory() {
        // SAFETY: `malloc_trim` takes the allocator's locks and leaves blocks that are in use alone.
        unsafe { libc::malloc_trim(0) };
    }

    pub(super) fn keep_freed_memory() {
        let set = |parameter, value| {
            // SAFETY: `mallopt` sets the value under the allocator's lock, so other threads may allocate meanwhile. glibc
            // also changes these values at run time. An invalid value changes nothing.
            unsafe { libc::mallopt(parameter, value) == 1 }
        };
        let threshold = libc::M_MMAP_THRESHOLD;
        // Any of these settings stops glibc from raising the threshold by itself, so this one has to come first.
        if set(threshold, i32::MAX) || set(threshold, 32 << 20) {
            set(libc::M_TRIM_THRESHOLD, i32::MAX);
            set(libc::M_TOP_PAD, 64 << 20);
        }
    }

    #[cfg(test)]
    mod tests {
        /// Returns the number of blocks that are mappings of their own, which freeing gives back to the system.
        fn mapped_blocks() -> usize {
            // SAFETY: it reads counters.
            unsafe { libc::mallinfo2() }.hblks
        }

        #[test]
        fn large_blocks_are_kept_when_they_are_freed() {
            super::super::keep_freed_memory();
            let before = mapped_blocks();
            let block = vec![1_u8; 24 << 20];
            assert!(mapped_blocks() <= before);
            drop(block);
            super::give_back_freed_memory();
        }
    }
}
