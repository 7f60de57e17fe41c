//! The launcher's part of a command line: where it ends, which options it has, and those that other launchers call
//! otherwise.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{Arg, Args, Command};

use crate::error::Result;
use crate::settings::file::{GivenOption, SettingsFile, option_named};
use crate::settings::foreign;
use crate::settings::options::Options;

/// The commands that take the options of a launch.
pub(crate) const ENV: &str = "env";
pub(crate) const CONFIG: &str = "config";

/// The options that name a target in the place of a script.
const TARGETS: [&str; 2] = ["example", "bin"];

/// A command line cut in two.
#[derive(Clone, Debug)]
pub(crate) struct Argv {
    /// The launcher's part, with the program name in front and the script at its end.
    pub(crate) launcher: Vec<OsString>,
    /// The script's part.
    pub(crate) script: Vec<OsString>,
    /// The options of a launch that are given.
    given: Vec<GivenOption>,
    /// The place of the first option.
    pub(crate) options_at: usize,
}

impl Argv {
    /// Cuts `arguments` (the program name first) where the options of `command` end, and replaces flags of other
    /// launchers by its options.
    ///
    /// A sub-command's line is not cut.
    pub(crate) fn split(
        command: &Command,
        arguments: impl IntoIterator<Item = OsString>,
    ) -> std::result::Result<Self, clap::Error> {
        let mut argv = Self {
            launcher: arguments.into_iter().collect(),
            script: Vec::new(),
            given: Vec::new(),
            options_at: 1,
        };
        let name = argv.launcher.get(1);
        let mut subcommands = command.get_subcommands();
        let subcommand = name.and_then(|name| subcommands.find(|known| name == known.get_name()));
        let options = match subcommand {
            None => command,
            Some(subcommand) if [ENV, CONFIG].contains(&subcommand.get_name()) => {
                argv.options_at = 2;
                subcommand
            }
            Some(_) => return Ok(argv),
        };
        let end = argv
            .read_options(options)
            .map_err(|text| clap::Error::raw(ErrorKind::UnknownArgument, text + "\n"))?;
        if subcommand.is_none() {
            argv.script = argv.launcher.split_off(end);
        }
        Ok(argv)
    }

    /// Reads the options of `command`, and returns where the script's part begins.
    fn read_options(&mut self, command: &Command) -> std::result::Result<usize, String> {
        let mut implied = Vec::new();
        let mut at = self.options_at;
        loop {
            if foreign::translate(&mut self.launcher, at, &mut implied)? {
                continue;
            }
            let Some(word) = self.launcher.get(at) else {
                break;
            };
            let bytes = word.as_bytes();
            if bytes == b"--" {
                at += 2;
                break;
            } else if let Some(long) = bytes.strip_prefix(b"--") {
                let equals = long.iter().position(|&byte| byte == b'=');
                let name = &long[..equals.unwrap_or(long.len())];
                let option = option_named(command, &String::from_utf8_lossy(name));
                let is_next = equals.is_none() && option.is_some_and(takes_value);
                let value = match equals {
                    Some(equals) => Some(OsStr::from_bytes(&long[equals + 1..]).to_owned()),
                    None => self.launcher.get(at + 1).filter(|_| is_next).cloned(),
                };
                let is_target = TARGETS.iter().any(|target| target.as_bytes() == name);
                self.given
                    .extend(option.and_then(|option| given(option, value)));
                at += 1 + usize::from(is_next);
                if is_target {
                    break;
                }
            } else if let Some(shorts) =
                bytes.strip_prefix(b"-").filter(|shorts| !shorts.is_empty())
            {
                let (options, is_next) = short_options(command, shorts);
                let options = options.into_iter();
                self.given
                    .extend(options.filter_map(|option| given(option, None)));
                at += 1 + usize::from(is_next);
            } else {
                at += 1;
                break;
            }
        }
        let mut end = at.min(self.launcher.len());
        for implied in implied {
            let is_said = |given: &GivenOption| implied.unless.contains(&given.name.as_str());
            if self.given.iter().any(is_said) {
                continue;
            }
            let name = implied.option.to_owned();
            let word = format!("--{name}={}", implied.value);
            self.launcher.insert(self.options_at, word.into());
            self.given.push(GivenOption { name, value: None });
            end += 1;
        }
        Ok(end)
    }

    /// Reads the file of settings for a command that takes one, without what this line overrides. An agent's options are
    /// all in its order.
    pub(crate) fn settings_file(&self, command: &Command) -> Result<Option<SettingsFile>> {
        let value = |name: &str| self.given.iter().find(|given| given.name == name);
        let has_file = match self.launcher.get(1) {
            Some(word) if self.options_at == 2 => word == ENV,
            Some(word) => !is_subcommand(command, word),
            None => true,
        };
        if !has_file
            || ["client-word", "help", "version"]
                .iter()
                .any(|&name| value(name).is_some())
        {
            return Ok(None);
        }
        let path = value("config-file").and_then(|given| given.value.as_deref());
        let launch = Options::augment_args(Command::new("accel-launch"));
        let file = SettingsFile::read(path.map(Path::new), &launch)?;
        Ok(file.map(|file| file.beneath(&self.given)))
    }
}

/// Returns the option as it was given, if it has a long name.
fn given(option: &Arg, value: Option<OsString>) -> Option<GivenOption> {
    let name = option.get_long()?.to_owned();
    Some(GivenOption { name, value })
}

/// Returns the bundled short options, and `true` if the last of them takes the next argument as its value.
fn short_options<'a>(command: &'a Command, shorts: &[u8]) -> (Vec<&'a Arg>, bool) {
    let mut found = Vec::new();
    for (at, &short) in shorts.iter().enumerate() {
        let mut options = command.get_arguments();
        let option = options.find(|option| option.get_short() == Some(char::from(short)));
        found.extend(option);
        if option.is_some_and(takes_value) {
            // The rest of the same argument is the value.
            return (found, at + 1 == shorts.len());
        }
    }
    (found, false)
}

fn takes_value(option: &Arg) -> bool {
    option.get_action().takes_values()
}

fn is_subcommand(command: &Command, name: &OsStr) -> bool {
    command
        .get_subcommands()
        .any(|subcommand| name == subcommand.get_name())
}
