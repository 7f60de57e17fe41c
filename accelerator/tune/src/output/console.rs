use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use accelerator_host::text::figure;

use super::table::{Rows, best_line, counts, status, word};
use crate::config::TrialId;
use crate::view::{SearchView, TrialStatus};

/// The output of a search while it runs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Display {
    /// The table on a terminal, lines elsewhere.
    #[default]
    Auto,
    /// The table, every five seconds.
    Table,
    /// A line when a trial ends, and now and then how far the search is; the table at the end.
    Lines,
    /// Nothing.
    Quiet,
}

#[derive(Debug)]
pub(crate) struct Console {
    display: Display,
    is_terminal: bool,
    shown: Option<Instant>,
    summed_up: Instant,
    /// The number of lines of the terminal that the table has.
    drawn: usize,
    statuses: BTreeMap<TrialId, TrialStatus>,
}

impl Console {
    pub(crate) fn new(display: Display) -> Self {
        let is_terminal = io::stdout().is_terminal();
        let display = match (display, is_terminal) {
            (Display::Auto, true) => Display::Table,
            (Display::Auto, false) => Display::Lines,
            (display, _) => display,
        };
        Self {
            display,
            is_terminal,
            shown: None,
            summed_up: Instant::now(),
            drawn: 0,
            statuses: BTreeMap::new(),
        }
    }

    pub(crate) fn is_due(&self) -> bool {
        let every = match self.display {
            Display::Quiet => return false,
            Display::Table | Display::Auto => TABLE_EVERY,
            Display::Lines => LOOK_EVERY,
        };
        self.shown.is_none_or(|shown| shown.elapsed() >= every)
    }

    /// Shows how far the search is. A console that nobody reads any more is no reason to end.
    pub(crate) fn show(&mut self, view: &SearchView) {
        self.shown = Some(Instant::now());
        let text = match self.display {
            Display::Quiet => return,
            Display::Table | Display::Auto => self.table(view),
            Display::Lines => self.lines(view),
        };
        print(&text);
    }

    pub(crate) fn finish(&mut self, view: &SearchView) {
        if self.display == Display::Quiet {
            return;
        }
        let lines = match self.display {
            Display::Lines => self.lines(view),
            _ => String::new(),
        };
        let table = status(view, Rows::All);
        print(&format!("{}{lines}{table}", self.above()));
    }

    pub(crate) fn note(&self, text: &str) {
        if self.display != Display::Quiet {
            print(&format!("{text}\n"));
        }
    }

    fn table(&mut self, view: &SearchView) -> String {
        let table = status(view, Rows::AtMost(MOST_ROWS));
        if !self.is_terminal {
            return format!("{table}\n");
        }
        let (columns, rows) = terminal_size();
        let lines = table.lines().take(rows.saturating_sub(1));
        let lines: Vec<String> = lines
            .map(|line| line.chars().take(columns).collect())
            .collect();
        let text = format!("{}{}\n", self.above(), lines.join("\n"));
        self.drawn = lines.len();
        text
    }

    /// Goes back to where the table begins.
    fn above(&mut self) -> String {
        match std::mem::take(&mut self.drawn) {
            0 => String::new(),
            drawn => format!("\x1b[{drawn}A\x1b[J"),
        }
    }

    fn lines(&mut self, view: &SearchView) -> String {
        let mut text = String::new();
        for trial in &view.trials {
            let before = self.statuses.insert(trial.id, trial.status);
            let has_ended = matches!(trial.status, TrialStatus::Terminated | TrialStatus::Error);
            if !has_ended || before == Some(trial.status) {
                continue;
            }
            let metric = &view.objective.metric;
            let (name, word) = (&trial.name, word(trial.status));
            text.push_str(&match &trial.last {
                Some(last) => {
                    let iterations = last.training_iteration;
                    let value = last.value(metric);
                    let value = value.map_or_else(|| "none".to_owned(), figure);
                    format!("{name} {word} after {iterations} iterations: {metric}={value}\n")
                }
                None => format!("{name} {word} without a report\n"),
            });
            if let (TrialStatus::Error, Some(error)) = (trial.status, &trial.error) {
                text.push_str(&format!("  {}\n", error.replace('\n', "\n  ")));
            }
        }
        if self.summed_up.elapsed() >= SUM_UP_EVERY {
            self.summed_up = Instant::now();
            let counts = counts(view.trials.iter()).join(", ");
            text.push_str(&format!(
                "Number of trials: {} ({counts})\n",
                view.trials.len()
            ));
            if let Some(best) = best_line(view) {
                text.push_str(&format!("{best}\n"));
            }
        }
        text
    }
}

/// Ray's numbers.
const TABLE_EVERY: Duration = Duration::from_secs(5);
const MOST_ROWS: usize = 20;
const SUM_UP_EVERY: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_secs(1);

fn print(text: &str) {
    if !text.is_empty() {
        let mut output = io::stdout().lock();
        let _ = output.write_all(text.as_bytes());
        let _ = output.flush();
    }
}

fn terminal_size() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 1 => (size.ws_col.into(), size.ws_row.into()),
        _ => (usize::MAX, usize::MAX),
    }
}
