//! Settings that are one of a few names.

use core::fmt::Display;

use crate::core::error::{Error, Result};

/// The one of `all` that is shown as `name`. An error lists them.
pub(crate) fn named<T: Copy + Display>(what: &str, name: &str, all: &[T]) -> Result<T> {
    let found = all.iter().find(|one| one.to_string() == name);
    found.copied().ok_or_else(|| {
        let names: Vec<_> = all.iter().map(T::to_string).collect();
        let expected = match names.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => "nothing".to_owned(),
        };
        Error::config(format!("there is no {what} `{name}`; expected {expected}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_told_with_all_that_are_known() {
        assert_eq!(named("number", "2", &[1, 2, 3]).unwrap(), 2);
        for (all, expected) in [
            (&[1, 2, 3][..], "there is no number `4`; expected 1, 2 or 3"),
            (&[1][..], "there is no number `4`; expected 1"),
        ] {
            let error = named("number", "4", all).unwrap_err();
            assert!(error.is_config());
            assert_eq!(error.to_string(), expected);
        }
    }
}
