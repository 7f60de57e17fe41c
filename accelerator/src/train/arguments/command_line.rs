//! Arguments from a command line: `#[command(flatten)]` in a struct of clap.

use std::path::PathBuf;

use clap::builder::{NonEmptyStringValueParser, ValueParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde_json::Value;

use super::TrainingArguments;
use super::table::Argument;

/// The flag of a file whose arguments hold unless a flag sets them.
const FILE: &str = "arguments-file";

impl Args for TrainingArguments {
    fn augment_args(command: Command) -> Command {
        let defaults = Self::default().to_map().unwrap_or_default();
        let file = Arg::new(FILE)
            .long(FILE)
            .value_name("FILE")
            .value_parser(ValueParser::path_buf())
            .help("Read training arguments from this TOML or JSON file; flags take precedence")
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
            let Some(values) = matches.get_many::<String>(argument.name) else {
                continue;
            };
            self.clear_list(argument.name).map_err(refused)?;
            for value in values {
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
    // The last occurrence wins; those of a list accumulate.
    let arg = match default {
        Value::Array(_) => arg,
        _ => arg.overrides_with(argument.name),
    };
    let help = argument.help.trim();
    match default {
        Value::Bool(_) => arg
            .num_args(0..=1)
            .default_missing_value("true")
            .value_name(match argument.type_name {
                "bool" => "BOOL",
                _ => "BOOL|PATH",
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
        std::fs::write(
            &file,
            "learning_rate = 0.5\nseed = 7\nreport_to = [\"tensorboard\"]",
        )
        .unwrap();
        let file = file.display();
        let parsed = parse(&format!("--arguments-file {file} --seed 8")).unwrap();
        assert_eq!((parsed.learning_rate, parsed.seed), (0.5, 8));
        assert_eq!(parsed.report_to, [ReportTo::TensorBoard]);
        let parsed = parse(&format!("--arguments-file {file} --report-to csv")).unwrap();
        assert_eq!(parsed.report_to, [ReportTo::Csv]);
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
}
