//! Arguments from a command line (`#[command(flatten)]` in a struct of clap), and from files.

use std::path::{Path, PathBuf};

use clap::builder::{NonEmptyStringValueParser, ValueParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde_json::{Map, Value};

use super::TrainingArguments;
use super::table::Argument;
use crate::core::error::{Error, Result};
use crate::train::words::nearest;

/// The flag of a file whose arguments hold where no flag says otherwise.
const FILE: &str = "arguments-file";

impl Args for TrainingArguments {
    fn augment_args(command: Command) -> Command {
        let defaults = Self::default().to_map().unwrap_or_default();
        let file = Arg::new(FILE)
            .long(FILE)
            .value_name("FILE")
            .value_parser(ValueParser::path_buf())
            .help("Take the training arguments of this TOML or JSON file; flags go before")
            .help_heading(HEADING);
        Self::ARGUMENTS
            .iter()
            .fold(command.arg(file), |command, argument| {
                command.arg(flag(
                    argument,
                    defaults.get(argument.name).unwrap_or(&Value::Null),
                ))
            })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for TrainingArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut arguments = Self::default();
        arguments.update_from_arg_matches(matches)?;
        Ok(arguments)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let refused =
            |error: crate::Error| clap::Error::raw(ErrorKind::InvalidValue, format!("{error}\n"));
        if let Some(file) = matches.get_one::<PathBuf>(FILE) {
            *self = Self::from_file(file).map_err(refused)?;
        }
        for argument in Self::ARGUMENTS {
            for value in matches
                .get_many::<String>(argument.name)
                .into_iter()
                .flatten()
            {
                self.set(argument.name, value).map_err(|error| {
                    let said = error.to_string();
                    let said = said.trim_start_matches(argument.name);
                    refused(crate::Error::config(format!("--{}{said}", kebab(argument))))
                })?;
            }
        }
        Ok(())
    }
}

fn flag(argument: &Argument, default: &Value) -> Arg {
    let arg = Arg::new(argument.name)
        .long(kebab(argument))
        .alias(argument.name)
        .value_parser(NonEmptyStringValueParser::new())
        .help_heading(HEADING);
    // The last one holds, but of lists.
    let arg = match default {
        Value::Array(_) => arg,
        _ => arg.overrides_with(argument.name),
    };
    let help = argument.help.trim();
    match default {
        Value::Bool(_) => arg
            .num_args(0..=1)
            .default_missing_value("true")
            .value_name(if help.contains("path") {
                "BOOL|PATH"
            } else {
                "BOOL"
            })
            .help(help),
        Value::Array(_) => arg
            .action(ArgAction::Append)
            .value_delimiter(',')
            .value_name("WORD")
            .help(help),
        Value::Null => arg
            .allow_negative_numbers(true)
            .value_name("VALUE")
            .help(help),
        Value::Object(_) => arg.value_name("JSON").help(help),
        Value::Number(number) => arg
            .allow_negative_numbers(true)
            .value_name("N")
            .help(format!("{help} [default: {number}]")),
        Value::String(word) => arg
            .value_name("WORD")
            .help(format!("{help} [default: {word}]")),
    }
}

fn kebab(argument: &Argument) -> String {
    argument.name.replace('_', "-")
}

const HEADING: &str = "Training arguments";

impl TrainingArguments {
    /// The arguments that a TOML file, or a JSON file (`.json`), gives; the others have their defaults.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] if the file cannot be read; [`Error::is_config`] for an unknown key, with the nearest one, and
    /// for a value of another type.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::io("read the arguments in", path, error))?;
        let is_json = path.extension().is_some_and(|x| x == "json");
        let arguments = match is_json {
            true => serde_json::from_str(&text)
                .map_err(Error::other)
                .and_then(Self::from_map),
            false => Self::from_toml(&text),
        };
        arguments.map_err(|error| Error::config(format!("{}: {error}", path.display())))
    }

    /// The arguments that a TOML text gives; the others have their defaults.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] for an unknown key, with the nearest one, and for a value of another type.
    pub fn from_toml(text: &str) -> Result<Self> {
        let table = toml::from_str(text).map_err(|error| Error::config(error.to_string()))?;
        Self::from_map(table)
    }

    /// Sets one argument by its name, `learning_rate` or `learning-rate`, from a text.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] for an unknown name, with the nearest one, and for a value of another type.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let name = name.replace('-', "_");
        let mut map = self.to_map()?;
        // As Python writes them.
        let value = match value {
            "True" => "true",
            "False" => "false",
            value => value,
        };
        // A run's name may look like a number.
        let mut candidates = vec![Value::String(value.to_owned())];
        candidates.extend(serde_json::from_str(value));
        if let Some(Value::Array(list)) = map.get(&name) {
            let mut list = list.clone();
            list.push(Value::String(value.to_owned()));
            candidates = vec![Value::Array(list)];
        }
        let mut outcome = Ok(());
        for candidate in candidates.into_iter().rev() {
            map.insert(name.clone(), candidate);
            match Self::from_map(map.clone()) {
                Ok(set) => {
                    *self = set;
                    return Ok(());
                }
                // The error of the first, which is what the text looks like.
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }

    /// Returns all of them, by name.
    pub(crate) fn to_map(&self) -> Result<Map<String, Value>> {
        match serde_json::to_value(self).map_err(Error::other)? {
            Value::Object(map) => Ok(map),
            other => Err(Error::other(format!("arguments are no map: {other}"))),
        }
    }

    fn from_map(given: Map<String, Value>) -> Result<Self> {
        let known = || Self::ARGUMENTS.iter().map(|argument| argument.name);
        if let Some(unknown) = given.keys().find(|key| !known().any(|name| name == *key)) {
            let nearest = nearest(unknown, known());
            return Err(Error::config(format!(
                "there is no training argument {unknown:?}{nearest}"
            )));
        }
        // One at a time, so that the error names it.
        for (name, value) in &given {
            let one = Map::from_iter([(name.clone(), value.clone())]);
            serde_json::from_value::<Self>(Value::Object(one))
                .map_err(|error| Error::config(named(name, &error.to_string())))?;
        }
        serde_json::from_value(Value::Object(given))
            .map_err(|error| Error::config(error.to_string()))
    }
}

/// An error of an argument, with its name, which some have already.
fn named(name: &str, error: &str) -> String {
    let error = error
        .strip_prefix(name)
        .and_then(|rest| rest.strip_prefix(": "))
        .unwrap_or(error);
    format!("{name}: {error}")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::train::{IntervalStrategy, ReportTo, ResumeFrom};

    #[derive(Debug, Parser)]
    struct Program {
        #[arg(long)]
        data_dir: Option<PathBuf>,
        #[command(flatten)]
        training: TrainingArguments,
    }

    fn parse(words: &str) -> Result<TrainingArguments, clap::Error> {
        let words = std::iter::once("program").chain(words.split_whitespace());
        Ok(Program::try_parse_from(words)?.training)
    }

    #[test]
    fn flags_are_the_names_with_either_sign() {
        let parsed = parse(
            "--data-dir d --per-device-train-batch-size 64 --learning_rate 1e-3 --bf16 --eval-strategy epoch \
             --report-to csv,tensorboard --resume-from-checkpoint a/b --greater-is-better false --disable-tqdm True \
             --seed 1 --seed 42 --max-steps -1",
        )
        .unwrap();
        let expected = TrainingArguments {
            bf16: true,
            disable_tqdm: true,
            eval_strategy: IntervalStrategy::Epoch,
            greater_is_better: Some(false),
            learning_rate: 1e-3,
            per_device_train_batch_size: 64,
            report_to: vec![ReportTo::Csv, ReportTo::TensorBoard],
            resume_from_checkpoint: ResumeFrom::Path("a/b".into()),
            ..TrainingArguments::default()
        };
        assert_eq!(parsed, expected);
        assert_eq!(parse("").unwrap(), TrainingArguments::default());
    }

    #[test]
    fn flags_go_before_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.toml");
        std::fs::write(&file, "learning_rate = 0.5\nseed = 7").unwrap();
        let parsed = parse(&format!("--arguments-file {} --seed 8", file.display())).unwrap();
        assert_eq!((parsed.learning_rate, parsed.seed), (0.5, 8));
    }

    #[test]
    fn a_wrong_value_names_its_flag() {
        let error = parse("--optim adamw").unwrap_err().to_string();
        assert!(error.contains("--optim: there is no"), "{error}");
        assert!(error.contains("did you mean \"adamw_torch\"?"), "{error}");
    }

    #[test]
    fn the_help_shows_defaults() {
        let error = parse("--help").unwrap_err().to_string();
        assert!(error.contains("--learning-rate <N>"), "{error}");
        assert!(
            error.contains("[default: 5e-5]") || error.contains("[default: 0.00005]"),
            "{error}"
        );
    }

    #[test]
    fn arguments_come_back_from_json_and_toml() {
        let arguments = TrainingArguments {
            eval_steps: Some(0.25),
            eval_strategy: IntervalStrategy::Epoch,
            report_to: vec![ReportTo::Csv, ReportTo::TensorBoard],
            resume_from_checkpoint: ResumeFrom::Path("a/checkpoint-000002".into()),
            run_name: Some("7".to_owned()),
            ..TrainingArguments::default()
        };
        let map = arguments.to_map().unwrap();
        assert_eq!(TrainingArguments::from_map(map).unwrap(), arguments);
        let text = "eval_steps = 0.25\neval_strategy = \"epoch\"\nreport_to = [\"csv\", \"tensorboard\"]\n\
            resume_from_checkpoint = \"a/checkpoint-000002\"\nrun_name = \"7\"";
        assert_eq!(TrainingArguments::from_toml(text).unwrap(), arguments);
    }

    #[test]
    fn each_is_set_by_name() {
        let mut arguments = TrainingArguments::default();
        let given = [
            ("output_dir", "out"),
            ("learning-rate", "1e-3"),
            ("logging_steps", "10"),
            ("bf16", "True"),
            ("eval-steps", "5"),
            ("run_name", "7"),
            ("optim", "sgd"),
            ("resume_from_checkpoint", "true"),
            ("report_to", "csv"),
            ("report_to", "run"),
            ("lr_scheduler_kwargs", r#"{"power": 2}"#),
        ];
        for (name, value) in given {
            arguments.set(name, value).unwrap();
        }
        assert_eq!(arguments.learning_rate, 1e-3);
        assert_eq!(arguments.run_name.as_deref(), Some("7"));
        assert_eq!(arguments.eval_steps, Some(5.0));
        assert_eq!(arguments.resume_from_checkpoint, ResumeFrom::Newest);
        assert_eq!(arguments.report_to, [ReportTo::Csv, ReportTo::Run]);
        assert_eq!(arguments.lr_scheduler_kwargs.power, Some(2.0));
    }

    #[test]
    fn what_is_unknown_or_of_another_type_is_named() {
        let cases = [
            ("max_step = 3", "did you mean \"max_steps\"?"),
            ("optim = \"adamw\"", "optim: there is no \"adamw\""),
            ("bf16 = 3", "bf16: invalid type"),
            (
                "lr_scheduler_kwargs = { powr = 2 }",
                "lr_scheduler_kwargs: unknown field `powr`",
            ),
        ];
        for (text, expected) in cases {
            let error = TrainingArguments::from_toml(text).unwrap_err();
            assert!(error.is_config(), "{text}: {error}");
            assert!(error.to_string().contains(expected), "{text}: {error}");
        }
    }
}
