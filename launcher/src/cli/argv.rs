//! Splits the command line into the launcher's own arguments and those of the script.
//!
//! All options before the script are the launcher's, everything after it is the script's,
//! even where it looks like an option of the launcher. `--example NAME` and `--bin NAME`
//! stand in the place of a script. Clap has no such rule, so the line is split before it
//! is parsed.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::{Arg, Command};

/// The options that name what to run, in the place of a script.
const TARGETS: [&str; 2] = ["example", "bin"];

/// A command line cut in two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Argv {
    /// The launcher's part, with the program name in front and the script at its end.
    pub(crate) launcher: Vec<OsString>,
    /// The script's part.
    pub(crate) script: Vec<OsString>,
}

impl Argv {
    /// Cuts `arguments` (the program name first) where the options of `command` end.
    ///
    /// A sub-command's line is not cut.
    pub(crate) fn split(command: &Command, arguments: impl IntoIterator<Item = OsString>) -> Self {
        let mut launcher: Vec<OsString> = arguments.into_iter().collect();
        let end = Self::end_of_options(command, &launcher);
        let script = launcher.split_off(end);
        Self { launcher, script }
    }

    fn end_of_options(command: &Command, arguments: &[OsString]) -> usize {
        let mut at = 1;
        while let Some(argument) = arguments.get(at) {
            let bytes = argument.as_bytes();
            if bytes == b"--" {
                at += 2;
                break;
            } else if let Some(long) = bytes.strip_prefix(b"--") {
                let (name, value) = match long.iter().position(|&byte| byte == b'=') {
                    Some(equals) => (&long[..equals], Some(())),
                    None => (long, None),
                };
                let option = find(command, |option| {
                    let aliases = option.get_all_aliases().unwrap_or_default();
                    option
                        .get_long()
                        .into_iter()
                        .chain(aliases)
                        .any(|long| long.as_bytes() == name)
                });
                at += 1 + usize::from(value.is_none() && option.is_some_and(takes_value));
                if TARGETS.iter().any(|target| target.as_bytes() == name) {
                    break;
                }
            } else if let Some(shorts) =
                bytes.strip_prefix(b"-").filter(|shorts| !shorts.is_empty())
            {
                at += 1 + usize::from(short_waits_for_value(command, shorts));
            } else {
                let is_subcommand = at == 1 && is_subcommand(command, argument);
                at = if is_subcommand {
                    arguments.len()
                } else {
                    at + 1
                };
                break;
            }
        }
        at.min(arguments.len())
    }
}

/// Whether the last of the bundled short options takes the next argument as its value.
fn short_waits_for_value(command: &Command, shorts: &[u8]) -> bool {
    for (at, &short) in shorts.iter().enumerate() {
        let option = find(command, |option| {
            option.get_short() == Some(char::from(short))
        });
        if option.is_some_and(takes_value) {
            // What follows in the same argument is the value.
            return at + 1 == shorts.len();
        }
    }
    false
}

fn find(command: &Command, is_it: impl Fn(&Arg) -> bool) -> Option<&Arg> {
    command.get_arguments().find(|option| is_it(option))
}

fn takes_value(option: &Arg) -> bool {
    option.get_action().takes_values()
}

fn is_subcommand(command: &Command, name: &OsStr) -> bool {
    command
        .get_subcommands()
        .any(|subcommand| name == subcommand.get_name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn split(line: &str) -> (String, String) {
        let mut command = crate::cli::Cli::command();
        command.build();
        let arguments = std::iter::once("accel-launch")
            .chain(line.split_whitespace())
            .map(OsString::from);
        let argv = Argv::split(&command, arguments);
        let join = |part: &[OsString]| part.join(OsStr::new(" ")).into_string().unwrap();
        (join(&argv.launcher[1..]), join(&argv.script))
    }

    fn check(line: &str, launcher: &str, script: &str) {
        assert_eq!(
            split(line),
            (launcher.to_owned(), script.to_owned()),
            "{line}"
        );
    }

    #[test]
    fn everything_after_the_script_is_its_own() {
        check(
            "--num-processes 2 a.sh --num-processes 3 -h",
            "--num-processes 2 a.sh",
            "--num-processes 3 -h",
        );
        check("-n 2 a.sh x", "-n 2 a.sh", "x");
        check(
            "-n2 --quiet --log-dir=d a.sh -- x",
            "-n2 --quiet --log-dir=d a.sh",
            "-- x",
        );
        check("a.sh", "a.sh", "");
        check("./env plan", "./env", "plan");
    }

    #[test]
    fn named_targets_stand_in_the_place_of_the_script() {
        check(
            "-n 2 --example mnist --epochs 1",
            "-n 2 --example mnist",
            "--epochs 1",
        );
        check("--example=mnist --quiet", "--example=mnist", "--quiet");
        check("--bin b x", "--bin b", "x");
    }

    #[test]
    fn a_double_dash_ends_the_options() {
        check("-n 2 -- -odd --help", "-n 2 -- -odd", "--help");
        check("-- env x", "-- env", "x");
        check("--", "--", "");
    }

    #[test]
    fn subcommands_and_broken_lines_are_left_to_clap() {
        check("env --json", "env --json", "");
        check("plan --samples 3", "plan --samples 3", "");
        check("checkpoint show a 3", "checkpoint show a 3", "");
        check("./checkpoint list a", "./checkpoint", "list a");
        check("--no-such a.sh x", "--no-such a.sh", "x");
        check("--num-processes", "--num-processes", "");
        check("--help", "--help", "");
        check("", "", "");
    }
}
