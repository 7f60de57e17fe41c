//! Numbers of bytes, as people write them.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// A number of bytes, at least one: `4096`, `64KiB`, `25MB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size(NonZeroUsize);

impl Size {
    /// In bytes.
    pub(super) fn bytes(self) -> usize {
        self.0.get()
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number_ends = text.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, unit) = text.split_at(number_ends.unwrap_or(text.len()));
        let unit = unit.trim_start();
        let factor = match SIZE_UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
        {
            Some((_, factor)) => *factor,
            None => {
                let letter = unit.to_ascii_uppercase();
                if ["K", "M", "G", "T"].contains(&letter.as_str()) {
                    return Err(format!(
                        "{unit:?} is no unit; write {letter}B for powers of 1000, or {letter}iB for \
                         powers of 1024"
                    ));
                }
                let names: Vec<&str> = SIZE_UNITS.iter().map(|(name, _)| *name).collect();
                return Err(format!(
                    "{unit:?} is no unit; expected a number with one of{}, such as 64KiB",
                    names.join(" ")
                ));
            }
        };
        let bytes = match (number.parse::<usize>(), number.parse::<f64>()) {
            (Ok(number), _) => number.checked_mul(factor),
            // Whole in bytes, and far from where a fraction is lost.
            (Err(_), Ok(number)) if (number * factor as f64).fract() == 0.0 => {
                let bytes = number * factor as f64;
                (bytes < 2_f64.powi(52)).then_some(bytes as usize)
            }
            _ => {
                return Err(
                    "expected a whole number of bytes, such as 4096, 64KiB, 1.5MiB or 25MB".into(),
                );
            }
        };
        let bytes = bytes.ok_or("this is more than any memory holds")?;
        NonZeroUsize::new(bytes)
            .map(Self)
            .ok_or_else(|| "expected at least 1 byte".into())
    }
}

impl fmt::Display for Size {
    /// In the largest unit that it is a whole number of.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.bytes();
        let whole = SIZE_UNITS
            .iter()
            .rev()
            .find(|(_, factor)| bytes.is_multiple_of(*factor));
        match whole {
            Some((unit, factor)) if !unit.is_empty() => {
                formatter.pad(&format!("{} {unit}", bytes / factor))
            }
            _ => formatter.pad(&format!("{bytes} B")),
        }
    }
}

/// In ascending order.
const SIZE_UNITS: [(&str, usize); 10] = [
    ("", 1),
    ("B", 1),
    ("KB", 1_000),
    ("KiB", 1 << 10),
    ("MB", 1_000_000),
    ("MiB", 1 << 20),
    ("GB", 1_000_000_000),
    ("GiB", 1 << 30),
    ("TB", 1_000_000_000_000),
    ("TiB", 1 << 40),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        for (text, bytes, shown) in [
            ("1", 1, "1 B"),
            ("4096", 4096, "4 KiB"),
            ("4KiB", 4096, "4 KiB"),
            ("4 kib", 4096, "4 KiB"),
            ("64kb", 64_000, "64 KB"),
            ("25MB", 25_000_000, "25 MB"),
            ("25MiB", 26_214_400, "25 MiB"),
            ("1.5MiB", 1_572_864, "1536 KiB"),
            ("0.5KB", 500, "500 B"),
            ("1GB", 1_000_000_000, "1 GB"),
        ] {
            let size: Size = text.parse().unwrap();
            assert_eq!(size.bytes(), bytes, "{text}");
            assert_eq!(size.to_string(), shown, "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_what_was_expected() {
        for (text, says) in [
            ("", "whole number of bytes"),
            ("0", "at least 1 byte"),
            ("0KiB", "at least 1 byte"),
            ("MiB", "whole number of bytes"),
            ("-1", "is no unit"),
            (
                "1M",
                "\"M\" is no unit; write MB for powers of 1000, or MiB",
            ),
            ("64k", "write KB for powers of 1000, or KiB"),
            ("1.5", "whole number of bytes"),
            ("1.2.3KB", "whole number of bytes"),
            ("4KiBs", "\"KiBs\" is no unit"),
            ("99999999999999TiB", "more than any memory"),
            ("999999999999.5TB", "more than any memory"),
        ] {
            let error = text.parse::<Size>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
