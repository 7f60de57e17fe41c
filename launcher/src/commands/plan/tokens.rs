//! Plans of batches with a limit on their tokens.

use std::error::Error;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use accelerator_plan::{BatchPlan, Permutation, PlannedBatch, TailPolicy, TokenBatches};
use clap::Args;

use crate::text::short;

/// The options of batches with a limit on their tokens.
#[derive(Args, Clone, Debug)]
pub(super) struct TokenArgs {
    /// Plan batches that are limited by tokens. FILE lists the number of tokens of each sample, one per line, in the order
    /// of the data set; `-` reads standard input. An empty sample counts as one token.
    #[arg(long, value_name = "FILE", requires = "max_tokens")]
    lengths: Option<PathBuf>,

    /// The maximum number of tokens in a batch of one rank, as in `LoaderBuilder::max_tokens`: the number of samples times
    /// the length of the longest; with --pack, the sum of the lengths.
    #[arg(long, value_name = "N", requires = "lengths")]
    max_tokens: Option<u64>,

    /// Concatenate the samples of a batch without padding, as in `LoaderBuilder::max_packed_tokens`.
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
    tail: TailPolicy,
    /// The limit, for the heading of the table.
    limit: String,
    is_packed: bool,
}

/// Totals of the whole epoch, wherever the plan starts.
#[derive(Debug)]
struct TokenTotals {
    batches: usize,
    /// The tokens of the samples.
    real: u128,
    /// The tokens of the batches, with padding.
    padded: u128,
    /// The percentage of padding if samples were shuffled into batches of one size.
    unsorted_padding: f64,
    unsorted_batch_size: usize,
}

impl TokenArgs {
    /// Returns the plan for `world_size` ranks after `start` samples of the epoch; `None` without `--lengths`.
    ///
    /// # Errors
    ///
    /// If the lengths cannot be read, or the plan is impossible; the error names the option.
    pub(super) fn plan(
        &self,
        world_size: usize,
        tail: TailPolicy,
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
        let limit = batches.to_string();
        let order = match seed {
            Some(seed) => batches.shuffled(seed, epoch),
            None => batches.longest_first(),
        };
        let tokens = TokenTotals::of(&order, &lengths, self.pack, seed.unwrap_or(0));
        let batches = BatchPlan::new(order, world_size, tail)
            .map_err(|error| format!("--world-size {world_size}: {error}"))?
            .starting_at(start)
            .map_err(|error| format!("--start {start}: {error}"))?;
        Ok(Some(TokenPlan {
            batches,
            world_size,
            lengths,
            tokens,
            tail,
            limit,
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
        let at_most = match self.tail {
            TailPolicy::Uneven => "at most ",
            _ => "",
        };
        writeln!(
            out,
            "samples {samples}, {}, batches {} ({} ranks), steps {at_most}{}, tail {}",
            self.limit,
            totals.batches,
            self.world_size,
            self.steps(0),
            self.tail,
        )?;
        writeln!(
            out,
            "tokens {}, padding {:.1} % ({:.1} % with shuffled batches of {} samples)",
            totals.real,
            percent(totals.padded - totals.real, totals.padded),
            totals.unsorted_padding,
            totals.unsorted_batch_size,
        )
    }

    /// Writes the tokens of a batch that counts.
    pub(super) fn write_tokens(
        &self,
        batch: &PlannedBatch,
        out: &mut impl Write,
    ) -> io::Result<()> {
        if batch.is_idle() {
            return Ok(());
        }
        let (real, longest) = tokens(&batch.indices, &self.lengths);
        match (batch.indices.len(), self.is_packed) {
            (samples, false) => write!(out, "  ({samples} × {longest} tokens)"),
            (_, true) => write!(out, "  ({real} tokens)"),
        }
    }
}

impl TokenTotals {
    fn of(batches: &[Vec<u64>], lengths: &[u64], is_packed: bool, seed: u64) -> Self {
        let sums = |batches: &mut dyn Iterator<Item = &[u64]>| {
            batches.fold((0, 0), |(real, padded), batch| {
                let (tokens, longest) = tokens(batch, lengths);
                (real + tokens, padded + batch.len() as u128 * longest)
            })
        };
        let (real, padded) = sums(&mut batches.iter().map(Vec::as_slice));
        let size = lengths.len().div_ceil(batches.len().max(1)).max(1);
        let samples = lengths.len() as u64;
        let order = Permutation::new(samples, seed, 0);
        let order: Vec<u64> = (0..samples).map(|place| order.index(place)).collect();
        let (_, unsorted) = sums(&mut order.chunks(size));
        Self {
            batches: batches.len(),
            real,
            padded: if is_packed { real } else { padded },
            unsorted_padding: percent(unsorted - real, unsorted),
            unsorted_batch_size: size,
        }
    }
}

/// Returns the sum of the lengths of these samples, and the longest. An empty sample counts as one token.
fn tokens(samples: &[u64], lengths: &[u64]) -> (u128, u128) {
    samples.iter().fold((0, 0), |(sum, longest), &sample| {
        let length = u128::from(lengths[sample as usize].max(1));
        (sum + length, longest.max(length))
    })
}

fn percent(part: u128, whole: u128) -> f64 {
    match whole {
        0 => 0.0,
        whole => part as f64 / whole as f64 * 100.0,
    }
}

/// Reads one length per line.
fn read_lengths(path: &Path) -> Result<Vec<u64>, Box<dyn Error>> {
    let text = if path == Path::new("-") {
        let mut text = String::new();
        io::stdin().read_to_string(&mut text)?;
        text
    } else {
        fs::read_to_string(path)?
    };
    let length = |(number, line): (usize, &str)| {
        line.trim().parse().map_err(|_| {
            format!(
                "line {} is {:?}; expected the number of tokens of a sample",
                number + 1,
                short(line.trim())
            )
        })
    };
    let lengths = text.lines().enumerate().map(length);
    Ok(lengths.collect::<Result<_, _>>()?)
}
