//! Plans of batches with a limit on their tokens.

use std::error::Error;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use accelerator_plan::{BatchPlan, Permutation, PlannedBatch, TailPolicy, TokenBatches};
use clap::Args;

/// The options of batches with a limit on their tokens.
#[derive(Args, Clone, Debug)]
pub(super) struct TokenArgs {
    /// Plan batches by tokens, from the length of each sample: a file with one number per line; `-` reads the standard
    /// input.
    #[arg(long, value_name = "FILE", requires = "max_tokens")]
    lengths: Option<PathBuf>,

    /// The most tokens in a batch of one rank, as in `LoaderBuilder::max_tokens`: the number of samples times the longest
    /// length.
    #[arg(long, value_name = "N", requires = "lengths")]
    max_tokens: Option<u64>,

    /// Pack the samples of a batch into one sequence, as `LoaderBuilder::max_packed_tokens` does: without padding.
    #[arg(long, requires = "lengths")]
    pack: bool,
}

/// A plan of batches with a limit on their tokens, for all ranks.
#[derive(Debug)]
pub(super) struct TokenPlan {
    batches: BatchPlan,
    world_size: usize,
    lengths: Vec<u64>,
    tokens: TokenTotals,
    /// The settings, for the heading of the table.
    settings: String,
    is_packed: bool,
}

/// Sums over all batches.
#[derive(Debug)]
struct TokenTotals {
    batches: usize,
    /// The tokens of the samples.
    real: u64,
    /// The tokens of the batches, with padding.
    all: u64,
    /// The percentage of padding if samples were shuffled into batches of one size, and that size.
    unsorted: (f64, usize),
}

impl TokenArgs {
    /// Makes the plan for `world_size` ranks, if these options ask for one. It begins after `start` samples of the epoch.
    ///
    /// # Errors
    ///
    /// If the lengths cannot be read, or the plan is impossible; the error names the option.
    pub(super) fn plan(
        &self,
        world_size: usize,
        seed: Option<u64>,
        epoch: u64,
        start: u64,
    ) -> Result<Option<TokenPlan>, Box<dyn Error>> {
        let (Some(path), Some(max_tokens)) = (&self.lengths, self.max_tokens) else {
            return Ok(None);
        };
        let shown = path.display();
        let lengths = read_lengths(path).map_err(|error| format!("--lengths {shown}: {error}"))?;
        let batches = match self.pack {
            true => TokenBatches::packed(lengths.clone(), max_tokens),
            false => TokenBatches::padded(lengths.clone(), max_tokens),
        };
        let batches = batches.map_err(|error| format!("--max-tokens {max_tokens}: {error}"))?;
        let settings = batches.to_string();
        let order = match seed {
            Some(seed) => batches.shuffled(seed, epoch),
            None => batches.longest_first(),
        };
        let tokens = TokenTotals::of(&order, &lengths, self.pack, seed.unwrap_or(0));
        let batches = BatchPlan::new(order, world_size, TailPolicy::Exact)
            .map_err(|error| format!("--world-size {world_size}: {error}"))?
            .starting_at(start)
            .map_err(|error| format!("--start {start}: {error}"))?;
        Ok(Some(TokenPlan {
            batches,
            world_size,
            lengths,
            tokens,
            settings,
            is_packed: self.pack,
        }))
    }
}

impl TokenPlan {
    pub(super) fn world_size(&self) -> usize {
        self.world_size
    }

    pub(super) fn steps(&self, rank: usize) -> u64 {
        self.batches.steps(rank)
    }

    pub(super) fn rank(&self, rank: usize) -> impl Iterator<Item = PlannedBatch> {
        (0..self.steps(rank)).filter_map(move |step| self.batches.batch(rank, step))
    }

    pub(super) fn write_heading(&self, out: &mut impl Write) -> io::Result<()> {
        let (totals, samples) = (&self.tokens, self.lengths.len());
        writeln!(
            out,
            "samples {samples}, {}, batches {} ({} ranks), steps {}",
            self.settings,
            totals.batches,
            self.world_size,
            self.steps(0)
        )?;
        let (unsorted, size) = totals.unsorted;
        writeln!(
            out,
            "tokens {}, padding {:.1} %; it would be {unsorted:.1} % in shuffled batches of {size}",
            totals.real,
            percent(totals.all - totals.real, totals.all),
        )
    }

    /// Writes the tokens of a batch.
    pub(super) fn write_tokens(
        &self,
        batch: &PlannedBatch,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let (real, longest) = tokens(&batch.indices, &self.lengths);
        match (batch.indices.len(), self.is_packed) {
            (samples, false) => write!(out, "  ({samples} × {longest} tokens)"),
            (_, true) => write!(out, "  ({real} tokens)"),
        }
    }
}

impl TokenTotals {
    fn of(batches: &[Vec<u64>], lengths: &[u64], is_packed: bool, seed: u64) -> Self {
        let sums = |batches: &mut dyn Iterator<Item = &[u64]>, is_packed: bool| {
            batches.fold((0, 0), |(real, all), batch| {
                let (tokens, longest) = tokens(batch, lengths);
                let padded = batch.len() as u64 * longest;
                (real + tokens, all + if is_packed { tokens } else { padded })
            })
        };
        let (real, all) = sums(&mut batches.iter().map(Vec::as_slice), is_packed);
        let size = lengths.len().div_ceil(batches.len().max(1)).max(1);
        let samples = lengths.len() as u64;
        let order = Permutation::new(samples, seed, 0);
        let order: Vec<u64> = (0..samples).map(|place| order.index(place)).collect();
        let (_, unsorted) = sums(&mut order.chunks(size), false);
        Self {
            batches: batches.len(),
            real,
            all,
            unsorted: (percent(unsorted - real, unsorted), size),
        }
    }
}

/// Returns the sum of the lengths of these samples, and the longest. An empty sample counts as one token.
fn tokens(samples: &[u64], lengths: &[u64]) -> (u64, u64) {
    samples.iter().fold((0, 0), |(sum, longest), &sample| {
        let length = lengths[sample as usize].max(1);
        (sum + length, longest.max(length))
    })
}

fn percent(part: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        whole => part as f64 / whole as f64 * 100.0,
    }
}

/// Reads one length per line; empty lines do not count.
fn read_lengths(path: &Path) -> Result<Vec<u64>, Box<dyn Error>> {
    let text = if path == Path::new("-") {
        let mut text = String::new();
        io::stdin().read_to_string(&mut text)?;
        text
    } else {
        fs::read_to_string(path)?
    };
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    let length = |(number, line): (usize, &str)| {
        line.trim().parse().map_err(|_| {
            format!(
                "line {} is {line:?}; expected the number of tokens of a sample",
                number + 1
            )
        })
    };
    Ok(lines.map(length).collect::<Result<_, _>>()?)
}
