//! Arguments from files.

use std::path::Path;

use serde_json::{Map, Value};

use super::TrainingArguments;
use crate::core::error::{Error, Result};
use crate::train::words::nearest;

impl TrainingArguments {
    /// Reads arguments from a TOML file, or from a JSON file (`.json`). Arguments that are not in the file have their
    /// defaults.
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

    pub(super) fn from_toml(text: &str) -> Result<Self> {
        let table = toml::from_str(text).map_err(|error| Error::config(error.to_string()))?;
        Self::from_map(table)
    }

    /// Sets one argument by its name, `learning_rate` or `learning-rate`, from a text. For a list, adds the value to
    /// those that it has.
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

    /// Empties an argument that is a list; others stay as they are.
    #[cfg(feature = "clap")]
    pub(super) fn clear_list(&mut self, name: &str) -> Result<()> {
        let mut map = self.to_map()?;
        if let Some(Value::Array(list)) = map.get_mut(name) {
            list.clear();
            *self = Self::from_map(map)?;
        }
        Ok(())
    }

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
    use super::*;
    use crate::train::{IntervalStrategy, ReportTo, ResumeFrom};

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
