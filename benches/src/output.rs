use core::fmt::Display;

use serde::Serialize;

/// The flags of every bench that concern its output.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Output {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Cargo passes this flag
    #[arg(long, hide = true)]
    bench: bool,
}

impl Output {
    /// Prints a header, unless the output is JSON.
    pub fn header(self, header: impl Display) {
        if !self.json {
            println!("{header}");
        }
    }

    /// Prints a result.
    ///
    /// # Errors
    ///
    /// If it cannot be written as JSON.
    pub fn print(self, result: &(impl Display + Serialize)) -> serde_json::Result<()> {
        match self.json {
            true => println!("{}", serde_json::to_string(result)?),
            false => println!("{result}"),
        }
        Ok(())
    }
}
