use serde_json::Value;

use crate::error::{Error, Result};
use crate::runner::TrialStart;
use crate::space::Space;

/// A command with placeholders.
///
/// `{lr}` is the value of a parameter by its path; `{trial}` the trial's number, `{folder}` its folder, `{params}` a JSON file
/// with all parameters, `{metrics}` a file for its metrics, `{checkpoint}` what a checkpoint holds to go on from, or nothing.
/// `{{` is a brace.
#[derive(Clone, Debug)]
pub(crate) struct Template {
    words: Vec<String>,
    /// The paths that some configuration has, if not each.
    paths: Vec<String>,
}

impl Template {
    pub(crate) fn new(words: Vec<String>, space: &Space) -> Result<Self> {
        if words.is_empty() {
            return Err(Error::misuse(
                "there is no program to run: name it after `--`",
            ));
        }
        let mut names = space.table().keys();
        if let Some(name) = names.find(|name| OTHERS.contains(&name.as_str())) {
            return Err(Error::misuse(format!(
                "the parameter `{name}` has the name of a placeholder, which stands for something else: rename it"
            )));
        }
        Ok(Self {
            words,
            paths: space.parameters(),
        })
    }

    /// Whether the program writes its metrics to a file.
    pub(super) fn has_metrics(&self) -> bool {
        self.words.iter().any(|word| word.contains("{metrics}"))
    }

    /// The command of a trial.
    pub(super) fn fill(&self, start: &TrialStart) -> Result<Vec<String>> {
        let words = self.words.iter();
        words.map(|word| fill(word, start, &self.paths)).collect()
    }
}

/// Placeholders that are no parameters.
const OTHERS: [&str; 5] = ["trial", "folder", "params", "metrics", "checkpoint"];

/// Where a program writes its metrics, in the trial's folder.
pub(super) const METRICS: &str = "metrics.jsonl";

fn fill(word: &str, start: &TrialStart, paths: &[String]) -> Result<String> {
    let mut text = String::new();
    let mut rest = word;
    while let Some(at) = rest.find(['{', '}']) {
        text.push_str(&rest[..at]);
        let (brace, after) = rest[at..].split_at(1);
        if let Some(escaped) = after.strip_prefix(brace) {
            text.push_str(brace);
            rest = escaped;
            continue;
        }
        let end = after.find('}').filter(|_| brace == "{");
        let Some(end) = end else {
            // A brace of its own, as in a JSON argument without placeholders, stays.
            text.push_str(brace);
            rest = after;
            continue;
        };
        text.push_str(&value(&after[..end], start, paths)?);
        rest = &after[end + 1..];
    }
    text.push_str(rest);
    Ok(text)
}

fn value(name: &str, start: &TrialStart, paths: &[String]) -> Result<String> {
    let folder = &start.folder;
    Ok(match name {
        "trial" => start.trial.to_string(),
        "folder" => folder.display().to_string(),
        "params" => folder.join("params.json").display().to_string(),
        "metrics" => folder.join(METRICS).display().to_string(),
        "checkpoint" => {
            let folder = start
                .restore
                .as_ref()
                .map(|restore| restore.folder.as_path());
            // What the program has named lies alone in the checkpoint's folder.
            let entry = folder.and_then(|folder| folder.read_dir().ok()?.next()?.ok());
            entry.map_or_else(String::new, |entry| entry.path().display().to_string())
        }
        path => match start.config.value(path) {
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            // Of another option of a choice.
            None if paths.iter().any(|known| known == path) => String::new(),
            None => {
                let known: Vec<_> = start
                    .config
                    .leaves()
                    .into_iter()
                    .map(|(path, _)| path)
                    .collect();
                return Err(Error::misuse(format!(
                    "`{{{path}}}` in the program's arguments is no parameter; there are {}, and {{trial}}, {{folder}}, {{params}}, \
                     {{metrics}} and {{checkpoint}}",
                    known.join(", ")
                )));
            }
        },
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::trial_id::TrialId;

    #[test]
    fn a_parameter_of_another_option_is_empty() {
        let space = r#"{"opt": {"choice": [{"name": "sgd", "momentum": {"uniform": [0.1, 0.9]}}, {"name": "adam"}]}}"#;
        let words = vec!["--momentum={opt/momentum}".to_owned()];
        let template = Template::new(words, &serde_json::from_str(space).unwrap()).unwrap();
        let start = TrialStart {
            trial: TrialId::new(0),
            config: serde_json::from_str(r#"{"opt": {"name": "adam"}}"#).unwrap(),
            folder: PathBuf::from("/t"),
            restore: None,
        };
        assert_eq!(template.fill(&start).unwrap(), ["--momentum="]);
    }

    #[test]
    fn placeholders_are_filled_with_parameters() {
        let start = TrialStart {
            trial: TrialId::new(3),
            config: serde_json::from_str(r#"{"lr": 0.5, "opt": {"name": "sgd"}}"#).unwrap(),
            folder: PathBuf::from("/t"),
            restore: None,
        };
        let words = [
            "--lr={lr}",
            "{opt/name}",
            "{{x}}",
            "{trial}",
            "{params}",
            "a{checkpoint}b",
            "}",
            "{opt}",
        ];
        let template = Template::new(words.map(str::to_owned).to_vec(), &Space::default()).unwrap();
        assert_eq!(
            template.fill(&start).unwrap(),
            [
                "--lr=0.5",
                "sgd",
                "{x}",
                "00003",
                "/t/params.json",
                "ab",
                "}",
                "{\"name\":\"sgd\"}"
            ]
        );
        let error = Template::new(vec!["{rate}".to_owned()], &Space::default())
            .unwrap()
            .fill(&start)
            .unwrap_err();
        assert!(
            error.to_string().contains("there are lr, opt/name"),
            "{error}"
        );
    }
}
