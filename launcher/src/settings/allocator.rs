//! How a rank's allocator treats memory that is freed.

use std::ffi::OsString;

/// Settings of glibc's allocator; other allocators do not read them.
///
/// A training step allocates and frees the same large blocks again and again. By default glibc
/// gives them back to the system, and the kernel zeroes them anew each time: ten to fifteen
/// hundredths of the time of one process that trains, and a fifth to a quarter where two do at
/// the same time, since they wait for each other in the kernel. With the first three it keeps
/// them. The last asks for huge pages where the system gives them on request. Peaks of memory
/// grew by less than a tenth.
pub(crate) const DEFAULTS: [(&str, &str); 4] = [
    ("MALLOC_MMAP_THRESHOLD_", "4294967296"),
    ("MALLOC_TOP_PAD_", "67108864"),
    ("MALLOC_TRIM_THRESHOLD_", "4294967296"),
    ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
];

/// The settings for each rank, less those that the user has set (`inherited` returns true). A single
/// process gets them too: it gains as well, and what it takes can be compared with what two take.
pub(crate) fn settings(inherited: impl Fn(&str) -> bool) -> Vec<(&'static str, OsString)> {
    let chosen = DEFAULTS.iter().filter(|(name, _)| !inherited(name));
    chosen.map(|&(name, value)| (name, value.into())).collect()
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
        assert_eq!(names("").len(), 4);
        let others = names("MALLOC_TOP_PAD_");
        assert_eq!(
            others,
            [
                "MALLOC_MMAP_THRESHOLD_",
                "MALLOC_TRIM_THRESHOLD_",
                "GLIBC_TUNABLES"
            ]
        );
    }
}
