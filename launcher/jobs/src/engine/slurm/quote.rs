//! Words of bash and of Slurm's options.

use std::fmt::Write;
use std::path::Path;

use crate::error::{Error, Result};
use crate::output::shell_word;

/// Refuses an option of sbatch that would break the parsing of what Slurm prints about the job.
///
/// # Errors
/// When the option has a control character.
pub(super) fn check_option(option: &str) -> Result<()> {
    match option.contains(char::is_control) {
        true => Err(Error::usage(format!(
            "{option:?} cannot stand among the options of sbatch: it has a control character"
        ))),
        false => Ok(()),
    }
}

/// A path in which Slurm replaces nothing.
///
/// # Errors
/// When the path is not text, or has a backslash, which Slurm would remove.
pub(super) fn pattern(path: &Path) -> Result<String> {
    let text = path_text(path)?;
    match text.contains('\\') {
        true => Err(Error::usage(format!(
            "{text} has a backslash, which Slurm removes from names of files; give another folder by --jobs-dir"
        ))),
        false => Ok(text.replace('%', "%%")),
    }
}

/// A word of bash. One with control characters stands in `$'…'`, since Slurm refuses scripts with carriage returns.
pub(super) fn bash_word(word: &str) -> String {
    if !word.contains(char::is_control) {
        return shell_word(word);
    }
    let mut quoted = "$'".to_owned();
    for character in word.chars() {
        match character {
            '\'' | '\\' => quoted.extend(['\\', character]),
            // Up to two bytes in UTF-8; a digit that follows must not be taken for one of the escape.
            control if control.is_control() => {
                let mut bytes = [0; 4];
                for byte in control.encode_utf8(&mut bytes).bytes() {
                    // Writing to a string does not fail.
                    let _ = write!(quoted, "\\{byte:03o}");
                }
            }
            other => quoted.push(other),
        }
    }
    quoted.push('\'');
    quoted
}

/// A path as a word of bash.
///
/// # Errors
/// When it is not text.
pub(super) fn path_word(path: &Path) -> Result<String> {
    Ok(bash_word(&path_text(path)?))
}

/// A path as text.
///
/// # Errors
/// When it is not text.
pub(super) fn path_text(path: &Path) -> Result<String> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| {
        Error::usage(format!(
            "{} is not text in UTF-8, as a script of Slurm's has to be",
            path.display()
        ))
    })
}

/// As Slurm writes a time: `1-02:03:04`.
pub(super) fn clock(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let time = format!("{:02}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60);
    match days {
        0 => time,
        days => format!("{days}-{time}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bash_reads_what_was_written() {
        for value in [
            "",
            "a b",
            "it's",
            "a\r\n'b'\\\t\u{85}1$x",
            "-n",
            "é\n*",
            "\u{1}2",
        ] {
            let line = format!("printf %s {}", bash_word(value));
            assert!(!line.contains(char::is_control), "{line}");
            let read = std::process::Command::new("bash")
                .args(["-c", &line])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(read.stdout).unwrap(), value);
        }
    }

    #[test]
    fn times_are_those_of_a_clock() {
        for (seconds, text) in [(1, "00:00:01"), (7384, "02:03:04"), (93_784, "1-02:03:04")] {
            assert_eq!(clock(seconds), text);
        }
    }
}
