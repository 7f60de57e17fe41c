//! Plans as text.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::plan::{Action, Fault, FaultPlan, Point, SaveStage};

/// The reason why a text is no plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(pub(crate) String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl FromStr for FaultPlan {
    type Err = Error;

    /// Reads `rank=1 step=3 kill; rank=0 step=5 stop 10s`; an empty text is a plan of nothing.
    fn from_str(text: &str) -> Result<Self, Error> {
        let faults = text.split(';').map(str::trim).filter(|x| !x.is_empty());
        Ok(Self {
            faults: faults.map(fault).collect::<Result<_, _>>()?,
        })
    }
}

fn fault(text: &str) -> Result<Fault, Error> {
    let wrong = |what: String| {
        Error(format!(
            "{what} in the fault {text:?}; expected `rank=R [restart=K] PLACE ACTION`, with a place \
             of rendezvous, connect, step=N, op=N [within], save=N begin|data|written|renamed, and \
             an action of kill, segv, exit CODE, panic, stop [TIME], slow TIME, drop-connection, \
             corrupt-frame, disk-full, fail-write"
        ))
    };
    let mut words = text.split_whitespace().peekable();
    let (mut rank, mut restart) = (None, 0);
    let point = loop {
        let Some(word) = words.next() else {
            return Err(wrong("no place".to_owned()));
        };
        let (key, value) = match word.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (word, None),
        };
        let number = || {
            value
                .and_then(|x| x.parse::<u64>().ok())
                .ok_or_else(|| wrong(format!("{word:?} has no number")))
        };
        match key {
            "rank" => rank = usize::try_from(number()?).ok(),
            "restart" => restart = number()?,
            "rendezvous" => break Point::Rendezvous,
            "connect" => break Point::Connect,
            "step" => break Point::Step(number()?),
            "op" => {
                let operation = number()?;
                break match words.next_if_eq(&"within") {
                    Some(_) => Point::Within(operation),
                    None => Point::Operation(operation),
                };
            }
            "save" => {
                let stage = match words.peek() {
                    Some(&"begin") => Some(SaveStage::Begin),
                    Some(&"data") => Some(SaveStage::Data),
                    Some(&"written") => Some(SaveStage::Written),
                    Some(&"renamed") => Some(SaveStage::Renamed),
                    _ => None,
                };
                if stage.is_some() {
                    words.next();
                }
                break Point::Save(number()?, stage.unwrap_or(SaveStage::Data));
            }
            _ => return Err(wrong(format!("unknown place {word:?}"))),
        }
    };
    let Some(rank) = rank else {
        return Err(wrong("no rank".to_owned()));
    };
    let Some(name) = words.next() else {
        return Err(wrong("no action".to_owned()));
    };
    let argument = words.next();
    let time =
        || argument.map(|text| time(text).ok_or_else(|| wrong(format!("{text:?} is no time"))));
    let action = match name {
        "kill" => Action::Kill,
        "segv" => Action::Segv,
        "exit" => match argument.unwrap_or("3").parse() {
            Ok(code) => Action::Exit(code),
            Err(_) => return Err(wrong("an exit code that is no number".to_owned())),
        },
        "panic" => Action::Panic,
        "stop" => Action::Stop(time().transpose()?),
        "slow" => match time().transpose()? {
            Some(time) => Action::Slow(time),
            None => return Err(wrong("slow without a time".to_owned())),
        },
        "drop-connection" => Action::DropConnection,
        "corrupt-frame" => Action::CorruptFrame,
        "disk-full" => Action::DiskFull,
        "fail-write" => Action::FailWrite,
        _ => return Err(wrong(format!("unknown action {name:?}"))),
    };
    let takes = matches!(action, Action::Exit(_) | Action::Stop(_) | Action::Slow(_));
    let rest = if takes { words.next() } else { argument };
    match rest {
        Some(extra) => Err(wrong(format!("unexpected {extra:?}"))),
        None => Ok(Fault {
            rank,
            restart,
            point,
            action,
        }),
    }
}

/// `10s`, `250ms`, `0.5s`.
fn time(text: &str) -> Option<Duration> {
    if let Some(milliseconds) = text.strip_suffix("ms") {
        return milliseconds.parse().ok().map(Duration::from_millis);
    }
    let seconds = text.strip_suffix('s')?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::random::Bounds;

    #[test]
    fn what_is_written_can_be_read() {
        let text = "rank=1 step=3 kill; rank=0 restart=2 step=5 stop 10000ms; rank=2 op=9 \
                    corrupt-frame; rank=2 op=9 within kill; rank=0 save=4 written exit 7; rank=3 \
                    rendezvous stop";
        let plan: FaultPlan = text.parse().unwrap();
        assert_eq!(plan.to_string(), text);
        assert_eq!(
            plan.faults[1].action,
            Action::Stop(Some(Duration::from_secs(10)))
        );
        assert_eq!(
            "rank=0 step=5 stop 10s"
                .parse::<FaultPlan>()
                .unwrap()
                .faults[0]
                .restart,
            0
        );
        assert!("".parse::<FaultPlan>().unwrap().faults.is_empty());
    }

    #[test]
    fn mistakes_are_told() {
        for (text, expected) in [
            ("step=3 kill", "no rank"),
            ("rank=1 kill", "unknown place \"kill\""),
            ("rank=1", "no place"),
            ("rank=1 step=3", "no action"),
            ("rank=x step=3 kill", "\"rank=x\" has no number"),
            ("rank=1 step=3 slow", "slow without a time"),
            ("rank=1 step=3 slow 5", "\"5\" is no time"),
            ("rank=1 step=3 kill now", "unexpected \"now\""),
            ("rank=1 step=3 explode", "unknown action"),
        ] {
            let error = text.parse::<FaultPlan>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn drawn_plans_survive_as_text(seed: u64, ranks in 1_usize..9) {
            let bounds = Bounds { ranks, steps: 50, saves: 5, restarts: 3 };
            let plan = FaultPlan::random(seed, bounds);
            prop_assert!(!plan.faults.is_empty());
            prop_assert!(plan.faults.iter().all(|x| x.rank < ranks && x.restart <= 3));
            prop_assert_eq!(plan.to_string().parse::<FaultPlan>(), Ok(plan));
        }

        #[test]
        fn garbage_never_panics(text in "[a-z0-9=; -]{0,60}") {
            let _ = text.parse::<FaultPlan>();
        }
    }
}
