//! `accel-launch config`: writes the file of settings that launches read.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Command};

use crate::error::{Error, Result};
use crate::settings::file::{SettingsFile, default_path};
use crate::settings::options::Options;
use crate::text::print;

/// Arguments of `accel-launch config`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ConfigArgs {
    #[command(flatten)]
    options: Options,
    /// The options that were given, as settings.
    #[arg(skip)]
    pub(crate) given: SettingsFile,
}

impl ConfigArgs {
    /// Returns the place of the file: `--config-file`, or the default one.
    ///
    /// # Errors
    /// When there is no home folder.
    pub(crate) fn path(&self) -> Result<PathBuf> {
        let given = self.options.config_file.clone();
        given.or_else(default_path).ok_or_else(|| {
            Error::usage(
                "HOME is not set, so there is no place for the file: give --config-file FILE",
            )
        })
    }
}

/// The settings that are asked for on a terminal.
const QUESTIONS: [(&str, &str); 7] = [
    (
        "nproc-per-node",
        "Processes on this machine: a number, or gpu for one per GPU [1]",
    ),
    ("gpu-ids", "GPUs: all, or numbers such as 0,2 [all]"),
    (
        "mixed-precision",
        "Mixed precision: no, bf16 or f16 [the program's]",
    ),
    (
        "gradient-accumulation-steps",
        "Micro-batches per optimizer step [the program's]",
    ),
    (
        "hosts",
        "Hosts to reach by SSH, such as host0:4,host1:4 [this machine alone]",
    ),
    ("max-restarts", "Restarts of a job that fails [0]"),
    ("log-dir", "Folder of log files [none]"),
];

/// Writes the file: with the options that are given or, on a terminal, with the answers to questions.
///
/// # Errors
/// When there is nothing to write, or the file cannot be written.
pub(crate) fn run(arguments: &ConfigArgs) -> Result<ExitCode> {
    let mut file = arguments.given.clone();
    if file.is_empty() {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Err(Error::usage(
                "nothing to write: give settings, such as `accel-launch config --num-processes 2 --mixed-precision \
                 bf16`, or start it on a terminal, where it asks for them",
            ));
        }
        ask(&mut file, &mut stdin.lock(), &mut io::stdout())
            .map_err(|error| Error::system("the terminal cannot be read").with_source(error))?;
    }
    let text = file.write()?;
    print(&format!("wrote {}:\n{text}", file.path.display()))
}

/// Asks until each answer is one that a launch accepts. An empty answer leaves a setting out.
fn ask(
    file: &mut SettingsFile,
    input: &mut impl BufRead,
    output: &mut impl Write,
) -> io::Result<()> {
    for (name, question) in QUESTIONS {
        loop {
            write!(output, "{question}: ")?;
            output.flush()?;
            let mut answer = String::new();
            if input.read_line(&mut answer)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let answer = answer.trim();
            if answer.is_empty() {
                break;
            }
            let words = ["accel-launch".to_owned(), format!("--{name}={answer}")];
            let launch = Options::augment_args(Command::new("accel-launch"));
            let Err(error) = launch.try_get_matches_from(words) else {
                file.add(name, answer.to_owned());
                break;
            };
            let said = error.render().to_string();
            writeln!(output, "{}", said.lines().next().unwrap_or_default())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_answer_is_asked_for_again_and_an_empty_one_leaves_the_setting_out() {
        let mut file = SettingsFile::default();
        let mut output = Vec::new();
        ask(
            &mut file,
            &mut &b"two\n2\n\nfp8\nfp16\n\n\n3\nlogs\n"[..],
            &mut output,
        )
        .unwrap();
        assert_eq!(
            file.words(),
            [
                "--nproc-per-node=2",
                "--mixed-precision=fp16",
                "--max-restarts=3",
                "--log-dir=logs"
            ]
        );
        let output = String::from_utf8(output).unwrap();
        assert_eq!(
            output.matches("error: invalid value").count(),
            2,
            "{output}"
        );
        assert!(ask(&mut file, &mut &b"2\n"[..], &mut Vec::new()).is_err());
    }
}
