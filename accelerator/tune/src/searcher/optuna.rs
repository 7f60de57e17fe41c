use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use accelerator_host::sync::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Searcher, TrialEnd};
use crate::config::{Config, TrialId};
use crate::error::{Error, Kind, Result};
use crate::objective::{Mode, Objective};
use crate::space::{Domain, Node, Parameter, Scale, Space, multiples};
use crate::value::json_number;

/// Optuna 5 suggests configurations, in a Python process that the search starts; install it by
/// `pip install 'optuna>=5,<6'`, and `cmaes` for `CmaEsSampler`.
///
/// Its sampler is seeded with the search's seed. It learns what trials report, which of them a scheduler stopped, and which
/// failed. Parameters that it cannot draw are refused: grids, normal distributions, `sample_from`, and steps on a
/// logarithmic scale.
///
/// ```
/// use accelerator_tune::{Mode, Objective, Optuna, Search, SearchSpec, Space, loguniform};
///
/// let search = Search::new("line", Objective::new("loss", Mode::Min))
///     .space(Space::new([("lr", loguniform(1e-4, 1e-1))]))
///     .num_samples(50)
///     .search_alg(Optuna::new("TPESampler").sampler_arg("n_startup_trials", 5));
/// // In a file:
/// let spec: SearchSpec = serde_json::from_str(r#"{
///     "name": "line",
///     "metric": "loss",
///     "mode": "min",
///     "space": {"lr": {"loguniform": [1e-4, 1e-1]}},
///     "num_samples": 50,
///     "search_alg": {"type": "optuna", "sampler": "TPESampler", "sampler_args": {"n_startup_trials": 5}}
/// }"#)?;
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Optuna {
    sampler: String,
    sampler_args: Map<String, Value>,
    python: PathBuf,
}

impl Optuna {
    /// Uses the class of that name in `optuna.samplers`.
    #[must_use]
    pub fn new(sampler: impl Into<String>) -> Self {
        Self {
            sampler: sampler.into(),
            ..Self::default()
        }
    }

    /// A keyword argument of the sampler, such as `n_startup_trials`.
    #[must_use]
    pub fn sampler_arg(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.sampler_args.insert(name.into(), value.into());
        self
    }

    /// The interpreter that has Optuna, such as a virtual environment's `bin/python`; `python3` otherwise.
    #[must_use]
    pub fn python(mut self, interpreter: impl Into<PathBuf>) -> Self {
        self.python = interpreter.into();
        self
    }

    pub(crate) fn start(
        &self,
        space: &Space,
        objective: &Objective,
        seed: u64,
    ) -> Result<OptunaSearcher> {
        let space = OptunaSpace::new(space)?;
        let open = json!({
            "op": "open",
            "v": 1,
            "sampler": self.sampler,
            "args": self.sampler_args,
            // What NumPy takes.
            "seed": seed & 0xffff_ffff,
            "directions": [match objective.mode {
                Mode::Min => "minimize",
                Mode::Max => "maximize",
            }],
            "space": space.distributions()?,
        });
        let mut process = OptunaProcess::start(&self.python)?;
        let reply = process.call(&open)?;
        let python = self.python.display();
        let message = reply["message"].as_str().unwrap_or_default();
        let error = match reply["error"].as_str() {
            None => {
                let version = reply["optuna"].as_str().unwrap_or("of unknown version");
                return Ok(OptunaSearcher {
                    version: format!("Optuna {version}"),
                    process,
                    space,
                });
            }
            Some("import") => format!(
                "{python} has no Optuna ({message}); install it there by `{INSTALL}`, or name the interpreter that has it as \
                 `python`"
            ),
            Some("version") => {
                format!(
                    "{python} has Optuna {message}, and 5 is expected; install it there by `{INSTALL}`"
                )
            }
            Some("sampler") => {
                let sampler = &self.sampler;
                return Err(Error::misuse(format!(
                    "Optuna has no sampler `{sampler}`; it has {message}"
                )));
            }
            Some(_) => format!(
                "Optuna cannot make the sampler `{}` with {}: {message}{}",
                self.sampler,
                Value::Object(self.sampler_args.clone()),
                process.last_lines()
            ),
        };
        Err(Error::new(Kind::Searcher, error))
    }
}

/// The sampler that Optuna itself takes by default, by `python3`.
impl Default for Optuna {
    fn default() -> Self {
        Self {
            sampler: "TPESampler".to_owned(),
            sampler_args: Map::new(),
            python: "python3".into(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct OptunaSearcher {
    version: String,
    process: OptunaProcess,
    space: OptunaSpace,
}

impl OptunaSearcher {
    /// A reply that is no error.
    fn call(&mut self, call: &Value) -> Result<Value> {
        let reply = self.process.call(call)?;
        match reply.get("error") {
            None => Ok(reply),
            Some(_) => Err(Error::new(
                Kind::Searcher,
                format!(
                    "{} failed at {call}: {}{}",
                    self.version,
                    reply["message"].as_str().unwrap_or_default(),
                    self.process.last_lines()
                ),
            )),
        }
    }
}

impl Searcher for OptunaSearcher {
    fn ask(&mut self, trial: TrialId) -> Result<Option<Config>> {
        let reply = self.call(&json!({"op": "ask", "id": trial.to_string()}))?;
        self.space.config(&reply["params"]).map(Some)
    }

    fn report(&mut self, trial: TrialId, iteration: u64, value: f64) -> Result<()> {
        let (id, value) = (trial.to_string(), json_number(value));
        self.call(&json!({"op": "report", "id": id, "step": iteration, "value": value}))?;
        Ok(())
    }

    fn tell(&mut self, trial: TrialId, end: TrialEnd) -> Result<()> {
        let (state, value) = match end {
            TrialEnd::Completed(value) => ("COMPLETE", Some(json_number(value))),
            // Its value is the last that was reported. TPE ranks such trials behind complete ones, by how far they came and then
            // by value; told as complete, a value of an early iteration would be compared with final ones.
            TrialEnd::Stopped(_) => ("PRUNED", None),
            TrialEnd::Failed => ("FAIL", None),
        };
        let id = trial.to_string();
        self.call(&json!({"op": "tell", "id": id, "state": state, "value": value}))?;
        Ok(())
    }

    fn version(&self) -> Option<String> {
        Some(self.version.clone())
    }
}

#[derive(Debug)]
struct OptunaProcess {
    child: Child,
    calls: ChildStdin,
    replies: Receiver<io::Result<String>>,
    errors: Arc<Mutex<VecDeque<String>>>,
    /// Ends when the process has closed its standard error.
    error_reader: JoinHandle<()>,
}

impl OptunaProcess {
    fn start(python: &PathBuf) -> Result<Self> {
        let mut command = Command::new(python);
        command
            .args(["-u", "-c", include_str!("optuna.py")])
            // Suggestions may follow from the order of a set.
            .env("PYTHONHASHSEED", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A Ctrl-C is for the search, which tells what trials report while they save.
            .process_group(0);
        let mut child = accelerator_host::prepare_child(&mut command).spawn().map_err(|error| {
            let python = python.display();
            let message = format!(
                "cannot start {python}, which Optuna needs: {error}; install Python 3 and, by `{INSTALL}`, Optuna, or name the \
                 interpreter that has it as `python`"
            );
            Error::new(Kind::Searcher, message).with_source(error)
        })?;
        let (Some(calls), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(Error::new(Kind::Io, "Python has no pipes"));
        };
        let (sender, replies) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let errors = Arc::new(Mutex::new(VecDeque::new()));
        let lines = errors.clone();
        let error_reader = thread::spawn(move || {
            for line in BufReader::new(stderr)
                .split(b'\n')
                .map_while(io::Result::ok)
            {
                let mut lines = lines.lock();
                if lines.len() == ERROR_LINES {
                    lines.pop_front();
                }
                lines.push_back(String::from_utf8_lossy(&line).into_owned());
            }
        });
        Ok(Self {
            child,
            calls,
            replies,
            errors,
            error_reader,
        })
    }

    /// Its reply, which may be an error.
    fn call(&mut self, call: &Value) -> Result<Value> {
        let line = format!("{call}\n");
        // Where it has ended there is no reply either.
        let _ = self.calls.write_all(line.as_bytes());
        match self.replies.recv_timeout(DEADLINE) {
            Ok(Ok(reply)) => serde_json::from_str(&reply).map_err(|error| {
                let message = format!("Optuna's reply to {call} is {reply:?}: {error}");
                Error::new(Kind::Searcher, message).with_source(error)
            }),
            Ok(Err(error)) => {
                let message = format!("Optuna's reply to {call} cannot be read: {error}");
                Err(Error::new(Kind::Searcher, message).with_source(error))
            }
            Err(RecvTimeoutError::Timeout) => Err(Error::new(
                Kind::Searcher,
                format!(
                    "Optuna did not reply to {call} within {DEADLINE:?}; run the search again to resume it{}",
                    self.last_lines()
                ),
            )),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended(call)),
        }
    }

    fn ended(&mut self, call: &Value) -> Error {
        // It has closed its output, and so ends. What it says as it ends is read by then.
        let until = Instant::now() + ENDING;
        while Instant::now() < until
            && !(self.error_reader.is_finished() && matches!(self.child.try_wait(), Ok(Some(_))))
        {
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let how = match self.child.wait() {
            Ok(status) => format!(" ({status})"),
            Err(_) => String::new(),
        };
        let operation = call["op"].as_str().unwrap_or_default();
        Error::new(
            Kind::Searcher,
            format!(
                "Optuna's Python process ended{how} instead of replying to `{operation}`; run the search again to resume it{}",
                self.last_lines()
            ),
        )
    }

    /// Returns its last lines of standard error, for the end of a message.
    fn last_lines(&self) -> String {
        let lines = self.errors.lock();
        match lines.is_empty() {
            true => String::new(),
            false => {
                let lines: Vec<_> = lines.iter().map(String::as_str).collect();
                format!("; its last lines:\n{}", lines.join("\n"))
            }
        }
    }
}

impl Drop for OptunaProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const INSTALL: &str = "pip install 'optuna>=5,<6'";
/// The time that Optuna may take for one reply. Samplers that fit a model to thousands of trials take seconds.
const DEADLINE: Duration = Duration::from_secs(300);
const ENDING: Duration = Duration::from_secs(5);
/// The number of lines to keep of what Python writes to its standard error.
const ERROR_LINES: usize = 20;

/// The parameters that Optuna draws, and their places in a configuration.
#[derive(Debug)]
pub(super) struct OptunaSpace {
    /// The configuration, with null in place of each drawn parameter.
    template: Config,
    drawn: Vec<(String, Drawn)>,
}

#[derive(Debug)]
enum Drawn {
    Domain(Domain),
    /// Optuna draws the index of an option, which may be any value.
    Choice(Vec<Value>),
}

impl OptunaSpace {
    /// Fails where Optuna cannot draw a parameter, with its path.
    pub(super) fn new(space: &Space) -> Result<Self> {
        space.check()?;
        let mut drawn = Vec::new();
        let mut template = Map::new();
        for (name, parameter) in space.table() {
            template.insert(name.clone(), template_value(name, parameter, &mut drawn)?);
        }
        Ok(Self {
            template: template.into(),
            drawn,
        })
    }

    /// Returns the distributions by path, as Optuna's `json_to_distribution` reads them.
    pub(super) fn distributions(&self) -> Result<Value> {
        let distributions = self.drawn.iter().map(|(path, drawn)| {
            let distribution = match drawn {
                Drawn::Domain(domain) => distribution(path, *domain)?,
                Drawn::Choice(options) => {
                    let indices: Vec<_> = (0..options.len()).collect();
                    json!({"name": "CategoricalDistribution", "attributes": {"choices": indices}})
                }
            };
            Ok((path.clone(), distribution))
        });
        Ok(Value::Object(distributions.collect::<Result<_>>()?))
    }

    pub(super) fn config(&self, drawn: &Value) -> Result<Config> {
        let mut config = self.template.clone();
        for (path, parameter) in &self.drawn {
            let found = drawn.get(path);
            let value = match parameter {
                // As the space has it: Optuna may draw the upper bound, which the space leaves out.
                Drawn::Domain(domain) => found.and_then(Value::as_f64).map(|it| domain.clamp(it)),
                Drawn::Choice(options) => found
                    .and_then(Value::as_u64)
                    .and_then(|index| options.get(usize::try_from(index).ok()?).cloned()),
            };
            let value = value.ok_or_else(|| {
                let message = format!("Optuna suggests {drawn}, which has no value for `{path}`");
                Error::new(Kind::Searcher, message)
            })?;
            config.set(path, value);
        }
        Ok(config)
    }
}

/// A parameter with null where something is drawn.
fn template_value(
    path: &str,
    parameter: &Parameter,
    drawn: &mut Vec<(String, Drawn)>,
) -> Result<Value> {
    let below = |name: &dyn std::fmt::Display| format!("{path}/{name}");
    match &parameter.0 {
        Node::Constant(value) => Ok(value.clone()),
        Node::Domain(domain) => {
            // That it can be is checked here, before anything is started.
            distribution(path, *domain)?;
            drawn.push((path.to_owned(), Drawn::Domain(*domain)));
            Ok(Value::Null)
        }
        Node::Choice(options) => {
            let options = options.iter().map(|option| {
                let mut nested = Vec::new();
                let value = template_value(path, option, &mut nested)?;
                match nested.is_empty() {
                    true => Ok(value),
                    false => Err(refused(
                        path,
                        "a choice whose options are drawn themselves",
                        "draw what is in them beside it",
                    )),
                }
            });
            let options = options.collect::<Result<_>>()?;
            drawn.push((path.to_owned(), Drawn::Choice(options)));
            Ok(Value::Null)
        }
        Node::Table(table) => {
            let entries = table.iter().map(|(name, parameter)| {
                Ok((
                    name.clone(),
                    template_value(&below(name), parameter, drawn)?,
                ))
            });
            Ok(Value::Object(entries.collect::<Result<_>>()?))
        }
        Node::List(list) => {
            let values = list.iter().enumerate();
            let values =
                values.map(|(index, parameter)| template_value(&below(&index), parameter, drawn));
            Ok(Value::Array(values.collect::<Result<_>>()?))
        }
        Node::Grid(_) => Err(refused(
            path,
            "`grid_search`",
            "use `choice`, or the search algorithm `variants`",
        )),
        Node::SampleFrom(_) | Node::Cases(_) => Err(refused(
            path,
            "`sample_from`",
            "compute it in the trial, or use the search algorithm `variants`",
        )),
    }
}

fn distribution(path: &str, domain: Domain) -> Result<Value> {
    let (name, attributes) = match domain {
        Domain::Float(Scale::Log, _, _, Some(_)) => {
            return Err(refused(path, "`qloguniform`", "use `loguniform`"));
        }
        Domain::Int(Scale::Log, _, _, Some(_)) => {
            return Err(refused(path, "`qlograndint`", "use `lograndint`"));
        }
        Domain::Normal(..) => {
            return Err(refused(
                path,
                "a normal distribution",
                "use `uniform` between bounds",
            ));
        }
        Domain::Float(scale, low, high, step) => {
            let log = scale == Scale::Log;
            let attributes = json!({"low": low, "high": high, "step": step, "log": log});
            ("FloatDistribution", attributes)
        }
        Domain::Int(scale, low, high, step) => {
            // Optuna's upper bounds are included.
            let (low, high, step) = multiples(scale, low, high, step);
            let log = scale == Scale::Log;
            let attributes = json!({"low": low, "high": high, "step": step, "log": log});
            ("IntDistribution", attributes)
        }
    };
    Ok(json!({"name": name, "attributes": attributes}))
}

fn refused(path: &str, what: &str, advice: &str) -> Error {
    Error::misuse(format!(
        "the parameter `{path}` is {what}, which Optuna cannot draw; {advice}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(space: Value) -> Result<OptunaSpace> {
        OptunaSpace::new(&serde_json::from_value(space).unwrap())
    }

    #[test]
    fn domains_become_distributions_of_optuna() {
        let space = of(json!({
            "a": {"uniform": [0.5, 2.0]},
            "b": {"quniform": [0.0, 0.5, 0.25]},
            "c": {"loguniform": [0.5, 2.0]},
            "d": {"randint": [1, 5]},
            "e": {"qrandint": [15, 130, 16]},
            "f": {"lograndint": [1, 1024]},
            "g": {"choice": ["x", [1, 2], null]},
            "h": {"i": {"qrandint": [1, 5, 1]}},
            "j": 7,
        }))
        .unwrap();
        let float = |low: f64, high: f64, step: Option<f64>, log: bool| {
            json!({"name": "FloatDistribution",
                "attributes": {"low": low, "high": high, "step": step, "log": log}})
        };
        let int = |low: i64, high: i64, step: i64, log: bool| {
            json!({"name": "IntDistribution",
                "attributes": {"low": low, "high": high, "step": step, "log": log}})
        };
        let expected = json!({
            "a": float(0.5, 2.0, None, false),
            "b": float(0.0, 0.5, Some(0.25), false),
            "c": float(0.5, 2.0, None, true),
            "d": int(1, 4, 1, false),
            "e": int(16, 128, 16, false),
            "f": int(1, 1023, 1, true),
            "g": {"name": "CategoricalDistribution", "attributes": {"choices": [0, 1, 2]}},
            "h/i": int(1, 4, 1, false),
        });
        assert_eq!(space.distributions().unwrap(), expected);
    }

    #[test]
    fn what_optuna_draws_becomes_a_configuration_of_the_space() {
        let space = of(json!({
            "lr": {"uniform": [0.0, 1.0]},
            "g": {"choice": ["x", [1, {"y": 2}], null]},
            "h": {"layers": {"randint": [1, 5]}, "l": [{"randint": [0, 2]}, 9]},
            "epochs": 7,
        }))
        .unwrap();
        let drawn = json!({"lr": 1.0, "g": 1, "h/layers": 4, "h/l/0": 1});
        let lr = 1.0_f64.next_down();
        let expected = json!({
            "lr": lr, "g": [1, {"y": 2}], "h": {"layers": 4, "l": [1, 9]}, "epochs": 7,
        });
        let config = space.config(&drawn).unwrap();
        assert_eq!(Value::Object(config.as_map().clone()), expected);
        let error = space.config(&json!({"lr": 0.5, "g": 3})).unwrap_err();
        assert_eq!(error.kind(), Kind::Searcher);
        assert!(error.to_string().contains("`g`"), "{error}");
    }

    #[test]
    fn what_optuna_cannot_draw_is_refused_by_its_path() {
        for (parameter, what, advice) in [
            (json!({"grid_search": [1, 2]}), "grid_search", "choice"),
            (json!({"randn": [0.0, 1.0]}), "normal", "uniform"),
            (json!({"qrandn": [0.0, 1.0, 0.5]}), "normal", "uniform"),
            (
                json!({"qloguniform": [1.0, 8.0, 1.0]}),
                "qloguniform",
                "`loguniform`",
            ),
            (
                json!({"qlograndint": [1, 8, 2]}),
                "qlograndint",
                "`lograndint`",
            ),
            (
                json!({"sample_from": {"of": "x", "cases": {"1": 2}}}),
                "sample_from",
                "in the trial",
            ),
            (
                json!({"choice": [{"momentum": {"uniform": [0.0, 1.0]}}, 1]}),
                "drawn themselves",
                "beside it",
            ),
        ] {
            let space = json!({"x": 1, "optimizer": {"p": parameter}});
            let error = of(space).unwrap_err();
            let message = error.to_string();
            assert!(error.is_misuse(), "{message}");
            for part in ["`optimizer/p`", what, advice, "Optuna"] {
                assert!(message.contains(part), "{part}: {message}");
            }
        }
    }
}
