//! What a GPU is called on a command line and in `CUDA_VISIBLE_DEVICES`.

use std::fmt;
use std::str::FromStr;

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

    fn from_str(text: &str) -> Result<Self, String> {
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

    fn from_str(text: &str) -> Result<Self, String> {
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

/// With commas, as `CUDA_VISIBLE_DEVICES` has them.
pub(crate) fn joined(ids: &[GpuId]) -> String {
    let ids: Vec<_> = ids.iter().map(GpuId::to_string).collect();
    ids.join(",")
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
}
