//! Fault plans: the faults of a job, each on one rank at one point; as text, and drawn from a seed.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Faults of one job, each of which is triggered once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// The faults, in no particular order.
    pub faults: Vec<Fault>,
}

/// A fault of one rank at one point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank on which it happens.
    pub rank: usize,
    /// The attempt of the job in which it happens: 0 before any restart.
    pub restart: u64,
    /// The point at which it happens.
    pub point: Point,
    /// The action that it takes.
    pub action: Action,
}

/// A point in the run of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The moment before the rank contacts the store.
    Rendezvous,
    /// The moment at which the rank knows all others and is about to connect to them.
    Connect,
    /// The next backward pass that ends a window after this many optimizer steps, counted over the whole job.
    Step(u64),
    /// The collective with this sequence number, once the rank has declared it and sent its first data.
    Operation(u64),
    /// A place within the collective with this sequence number: behind its header and its first chunk,
    /// before the rank shows or sends more. A collective that ends with its first data has no such
    /// place.
    Within(u64),
    /// A stage of saving the checkpoint with this number.
    Save(u64, SaveStage),
}

/// A place within a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveStage {
    /// The start, before anything is written.
    Begin,
    /// The moment at which the first data file is half written.
    Data,
    /// All data are written and flushed; the checkpoint has no name yet.
    Written,
    /// The checkpoint has its name; `latest` does not point to it yet.
    Renamed,
}

/// The action of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// SIGKILL.
    Kill,
    /// SIGSEGV.
    Segv,
    /// The process exits with this code, without unwinding.
    Exit(i32),
    /// A panic on the thread of the rank.
    Panic,
    /// SIGSTOP, for a time or for ever.
    Stop(Option<Duration>),
    /// The rank sleeps, and lives.
    Slow(Duration),
    /// All connections of the rank are cut.
    DropConnection,
    /// The next frame that the rank sends has a wrong bit.
    CorruptFrame,
    /// The next write of a checkpoint fails as on a full disk.
    DiskFull,
    /// The next write of a checkpoint fails.
    FailWrite,
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{fault}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank={}", self.rank)?;
        if self.restart > 0 {
            write!(f, " restart={}", self.restart)?;
        }
        write!(f, " {} {}", self.point, self.action)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rendezvous => f.write_str("rendezvous"),
            Self::Connect => f.write_str("connect"),
            Self::Step(step) => write!(f, "step={step}"),
            Self::Operation(operation) => write!(f, "op={operation}"),
            Self::Within(operation) => write!(f, "op={operation} within"),
            Self::Save(number, stage) => write!(f, "save={number} {stage}"),
        }
    }
}

impl fmt::Display for SaveStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begin => "begin",
            Self::Data => "data",
            Self::Written => "written",
            Self::Renamed => "renamed",
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill => f.write_str("kill"),
            Self::Segv => f.write_str("segv"),
            Self::Exit(code) => write!(f, "exit {code}"),
            Self::Panic => f.write_str("panic"),
            Self::Stop(None) => f.write_str("stop"),
            Self::Stop(Some(time)) => write!(f, "stop {}ms", time.as_millis()),
            Self::Slow(time) => write!(f, "slow {}ms", time.as_millis()),
            Self::DropConnection => f.write_str("drop-connection"),
            Self::CorruptFrame => f.write_str("corrupt-frame"),
            Self::DiskFull => f.write_str("disk-full"),
            Self::FailWrite => f.write_str("fail-write"),
        }
    }
}

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
        fn garbage_never_panics(text in "[a-z0-9=; -]{0,60}") {
            let _ = text.parse::<FaultPlan>();
        }
    }
}
