//! The names of GPUs, and which of them a program sees.

pub(crate) mod inventory;

use std::ffi::OsStr;
use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// One GPU, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GpuId {
    /// Its place among all.
    Number(u32),
    /// `GPU-…`, or `MIG-…` for a part of one; CUDA takes the beginning of one as well.
    Uuid(String),
}

/// The value of `--gpu-ids`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GpuIds {
    /// Every GPU that is visible.
    All,
    /// These, at least one and each once.
    Listed(Vec<GpuId>),
}

impl FromStr for GpuId {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let is_uuid = ["GPU-", "MIG-"].iter().any(|prefix| {
            text.strip_prefix(prefix).is_some_and(|rest| {
                let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-/".contains(&byte);
                !rest.is_empty() && rest.bytes().all(is_part)
            })
        });
        if is_uuid {
            return Ok(Self::Uuid(text.to_owned()));
        }
        // Rust's numbers may begin with a plus.
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|_| is_number);
        number.map(Self::Number).ok_or_else(|| {
            format!("{text:?} is no GPU: expected a number from 0 on, or an id such as GPU-5a2c…")
        })
    }
}

impl fmt::Display for GpuId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(formatter),
            Self::Uuid(uuid) => formatter.write_str(uuid),
        }
    }
}

impl FromStr for GpuIds {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        const EXPECTED: &str = "expected `all`, or GPUs with commas between them, such as 0,2";
        if text == "all" {
            return Ok(Self::All);
        }
        if text.trim().is_empty() {
            return Err(format!("the list is empty; {EXPECTED}"));
        }
        let mut ids: Vec<GpuId> = Vec::new();
        for part in text.split(',').map(str::trim) {
            if part.is_empty() {
                return Err(format!(
                    "nothing stands before or after a comma; {EXPECTED}"
                ));
            }
            let id = part.parse()?;
            if ids.contains(&id) {
                return Err(format!("{id} is named twice; name each GPU once"));
            }
            ids.push(id);
        }
        Ok(Self::Listed(ids))
    }
}

/// Joins the ids with commas, as in `CUDA_VISIBLE_DEVICES`.
pub(crate) fn joined(ids: &[GpuId]) -> String {
    let ids: Vec<_> = ids.iter().map(GpuId::to_string).collect();
    ids.join(",")
}

/// The variable that limits which devices CUDA shows to a program.
pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The GPUs that a program sees; it numbers them by their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Visible {
    /// All of them.
    All,
    /// These.
    Listed(Vec<GpuId>),
}

impl Visible {
    /// The value of the variable, as CUDA reads it: nothing if it is empty, and nothing from the first
    /// entry on that is no GPU, as in `0,1,-1`.
    pub(crate) fn of(variable: Option<&OsStr>) -> Self {
        let Some(value) = variable else {
            return Self::All;
        };
        let value = value.to_string_lossy();
        let ids = value.split(',').map(|entry| entry.trim().parse());
        Self::Listed(ids.map_while(std::result::Result::ok).collect())
    }

    /// Selects `ids`, whose numbers are places among the visible GPUs.
    ///
    /// # Errors
    /// For one that is not visible, and for one that is named twice.
    pub(crate) fn select(&self, ids: &[GpuId]) -> Result<Vec<GpuId>> {
        let Self::Listed(there) = self else {
            return Ok(ids.to_vec());
        };
        let mut chosen: Vec<GpuId> = Vec::new();
        for id in ids {
            let found = match id {
                GpuId::Number(place) => usize::try_from(*place).ok().and_then(|x| there.get(x)),
                GpuId::Uuid(uuid) => there.iter().find(|known| is_same(known, uuid)),
            };
            let Some(found) = found else {
                return Err(Error::usage(hidden(id, there)));
            };
            if chosen.contains(found) {
                return Err(Error::usage(format!(
                    "--gpu-ids comes to {found} twice within {VISIBLE}={}; name each GPU once",
                    joined(there)
                )));
            }
            chosen.push(found.clone());
        }
        Ok(chosen)
    }
}

/// A value of [`VISIBLE`] for people: if it is empty, nothing is visible.
pub(crate) fn shown(value: &OsStr) -> String {
    match value.to_string_lossy() {
        text if text.trim().is_empty() => "none: the variable is empty".to_owned(),
        text => text.into_owned(),
    }
}

/// Returns `true` if an entry of the variable and an id are the same; either may be the beginning of the other.
fn is_same(known: &GpuId, uuid: &str) -> bool {
    match known {
        GpuId::Number(_) => false,
        GpuId::Uuid(known) => known.starts_with(uuid) || uuid.starts_with(known.as_str()),
    }
}

/// Describes the problem with an id that is not visible.
fn hidden(id: &GpuId, there: &[GpuId]) -> String {
    let shown = format!("{VISIBLE}={}", joined(there));
    match (id, there.len()) {
        (_, 0) => format!(
            "--gpu-ids names {id}, and {VISIBLE} hides every GPU; unset the variable, or leave the option out"
        ),
        (GpuId::Number(_), count) => format!(
            "--gpu-ids names {id}, and {shown} shows {count}: ids are places in that list, from 0 to \
             {}; choose among them, or unset the variable",
            count - 1
        ),
        (GpuId::Uuid(_), _) => format!(
            "--gpu-ids names {id}, which is not in {shown}; name places in that list, from 0, or unset \
             the variable"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        assert_eq!("all".parse(), Ok(GpuIds::All));
        let uuid = "MIG-GPU-5a2c/1/0";
        let Ok(GpuIds::Listed(ids)) = format!("0, 02,{uuid}").parse() else {
            panic!("expected a list");
        };
        assert_eq!(
            ids,
            [
                GpuId::Number(0),
                GpuId::Number(2),
                GpuId::Uuid(uuid.to_owned())
            ]
        );
        assert_eq!(joined(&ids), format!("0,2,{uuid}"));
    }

    #[test]
    fn nonsense_is_refused_with_what_is_wrong() {
        for (text, part) in [
            ("", "empty"),
            (" ", "empty"),
            ("0,", "comma"),
            (",0", "comma"),
            ("0,,1", "comma"),
            ("0,two", "\"two\""),
            ("-1", "\"-1\""),
            ("+1", "\"+1\""),
            ("0;1", "\"0;1\""),
            ("0,all", "\"all\""),
            ("GPU-", "\"GPU-\""),
            ("99999999999", "\"99999999999\""),
            ("1,0,01", "1 is named twice"),
            ("GPU-5a,GPU-5a", "GPU-5a is named twice"),
        ] {
            let error = text.parse::<GpuIds>().unwrap_err();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }

    fn visible(value: &str) -> Visible {
        Visible::of(Some(value.as_ref()))
    }

    fn ids(text: &str) -> Vec<GpuId> {
        text.split(',').map(|id| id.parse().unwrap()).collect()
    }

    #[test]
    fn the_variable_is_read_as_cuda_reads_it() {
        assert_eq!(Visible::of(None), Visible::All);
        for (value, shown) in [
            ("", ""),
            ("-1", ""),
            ("NoDevFiles", ""),
            ("3, 1", "3,1"),
            ("3,-1,2", "3"),
            ("GPU-5a,MIG-7f/1", "GPU-5a,MIG-7f/1"),
        ] {
            let Visible::Listed(there) = visible(value) else {
                panic!("expected a list");
            };
            assert_eq!(joined(&there), shown, "{value:?}");
        }
    }

    #[test]
    fn numbers_are_places_and_ids_are_found() {
        for (value, asked, chosen) in [
            ("4,5,6", "0,2", "4,6"),
            ("4,5,6", "2,0", "6,4"),
            ("GPU-5a2c,MIG-7f,3", "1,GPU-5a", "MIG-7f,GPU-5a2c"),
            ("GPU-5a", "GPU-5a2c-11", "GPU-5a"),
        ] {
            let found = visible(value).select(&ids(asked)).unwrap();
            assert_eq!(joined(&found), chosen, "{asked} of {value}");
        }
        let asked = ids("7,GPU-5a");
        assert_eq!(Visible::All.select(&asked).unwrap(), asked);
    }

    #[test]
    fn hidden_and_repeated_ids_are_refused() {
        for (value, asked, parts) in [
            ("4,5", "4", &["names 4", "shows 2", "from 0 to 1"][..]),
            ("4,5", "GPU-5a", &["GPU-5a", "not in", "4,5"]),
            ("", "0", &["names 0", "hides every GPU"]),
            ("GPU-5a,1", "0,GPU-5a", &["GPU-5a twice", "GPU-5a,1"]),
        ] {
            let error = visible(value).select(&ids(asked)).unwrap_err();
            assert!(error.is_usage());
            for part in parts {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
    }
}
