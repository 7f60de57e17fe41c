//! How a rank's allocator treats memory that is freed.

use std::ffi::OsString;
use std::num::NonZeroUsize;

/// Settings of glibc's allocator; other allocators do not read them.
///
/// A training step allocates and frees the same large blocks again and again. By default glibc
/// gives them back to the system, and the kernel zeroes them anew each time, which took a seventh
/// of the time of a small CNN's steps on two ranks. With these it keeps them; the peak stayed what
/// it was.
const VARIABLES: [(&str, &str); 3] = [
    ("MALLOC_MMAP_THRESHOLD_", "4294967296"),
    ("MALLOC_TOP_PAD_", "67108864"),
    ("MALLOC_TRIM_THRESHOLD_", "4294967296"),
];

/// The settings for each of `ranks` ranks, less those that the user has made (`inherited` tells).
/// A program that runs alone is left alone, as with threads: it behaves as without the launcher.
pub(crate) fn settings(
    ranks: NonZeroUsize,
    inherited: impl Fn(&str) -> bool,
) -> Vec<(&'static str, OsString)> {
    let chosen = VARIABLES
        .iter()
        .filter(|(name, _)| ranks.get() > 1 && !inherited(name));
    chosen.map(|&(name, value)| (name, value.into())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_and_the_users_own_settings_are_left_alone() {
        let names = |ranks, inherited: &str| -> Vec<_> {
            settings(NonZeroUsize::new(ranks).unwrap(), |name| name == inherited)
                .into_iter()
                .map(|(name, _)| name)
                .collect()
        };
        assert!(names(1, "").is_empty());
        assert_eq!(names(2, "").len(), 3);
        let others = names(2, "MALLOC_TOP_PAD_");
        assert_eq!(others, ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"]);
    }
}
