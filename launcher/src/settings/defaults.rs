//! Variables that each rank gets unless the user has set them.

use std::ffi::OsString;

use accelerator_env::PYTHON_UNBUFFERED;

/// A variable, its value, and why it has that.
///
/// The first four are settings of glibc's allocator; other allocators do not read them. A training step allocates and
/// frees the same large blocks again and again. By default glibc gives them back to the system, and the kernel zeroes
/// them anew each time: ten to fifteen hundredths of the time of one process that trains, and a fifth to a quarter
/// where two do at the same time, since they wait for each other in the kernel. With the first three it keeps them. The
/// last asks for huge pages where the system gives them on request. Peaks of memory grew by less than a tenth.
pub(crate) const DEFAULTS: [(&str, &str, &str); 5] = [
    ("MALLOC_MMAP_THRESHOLD_", "4294967296", KEPT),
    ("MALLOC_TOP_PAD_", "67108864", KEPT),
    ("MALLOC_TRIM_THRESHOLD_", "4294967296", KEPT),
    ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", KEPT),
    (
        PYTHON_UNBUFFERED.0,
        PYTHON_UNBUFFERED.1,
        "default: output is shown when it is printed",
    ),
];

const KEPT: &str = "default: ranks keep memory that they freed";

/// Returns the settings for each rank, except those that the user has set (`inherited` returns true). A single process
/// gets them too: it gains as well, and its memory use stays comparable with that of two processes.
pub(crate) fn settings(inherited: impl Fn(&str) -> bool) -> Vec<(&'static str, OsString)> {
    let chosen = DEFAULTS.iter().filter(|(name, ..)| !inherited(name));
    chosen
        .map(|&(name, value, _)| (name, value.into()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_settings_are_left_alone() {
        let names = |inherited: &str| -> Vec<_> {
            settings(|name| name == inherited)
                .into_iter()
                .map(|(name, _)| name)
                .collect()
        };
        assert_eq!(names("").len(), 5);
        let others = names("MALLOC_TOP_PAD_");
        assert_eq!(
            others,
            [
                "MALLOC_MMAP_THRESHOLD_",
                "MALLOC_TRIM_THRESHOLD_",
                "GLIBC_TUNABLES",
                "PYTHONUNBUFFERED"
            ]
        );
    }
}
