//! `forebay top`: the server live in the terminal, or one picture of it for a script.

mod model;
mod view;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use forebay_control::Client;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::client::Daemon;
use crate::output;
use model::Model;

/// Time between two looks at the server.
const PERIOD: Duration = Duration::from_secs(1);

/// Arguments of `forebay top`.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Print one picture as text, and end
    #[arg(long)]
    once: bool,
    /// Columns and rows of that picture
    #[arg(long, value_name = "COLUMNSxROWS", default_value = "80x24", value_parser = dimensions)]
    size: (u16, u16),
    #[command(flatten)]
    daemon: Daemon,
}

/// Parses the size of a picture.
fn dimensions(text: &str) -> Result<(u16, u16), String> {
    let parsed = text.split_once('x').and_then(|(columns, rows)| {
        let size: (u16, u16) = (columns.parse().ok()?, rows.parse().ok()?);
        ((20..=500).contains(&size.0) && (5..=200).contains(&size.1)).then_some(size)
    });
    parsed.ok_or_else(|| "use COLUMNSxROWS, from 20x5 to 500x200".to_owned())
}

/// Shows the server until the reader quits.
pub fn run(args: &TopArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    let mut model = Model::default();
    if args.once {
        model.look(&client);
        if let Some(lost) = &model.lost {
            bail!("{lost}");
        }
        return Ok(output::print(&picture(&mut model, args.size)?)?);
    }
    if !std::io::stdout().is_terminal() {
        bail!("standard output is not a terminal; use --once");
    }
    // A server that is not there is an error, one that goes away later is not.
    model.look(&client);
    if let Some(lost) = &model.lost {
        bail!("{lost}");
    }
    let mut terminal = ratatui::try_init()?;
    let outcome = show(&mut terminal, &client, &mut model);
    ratatui::restore();
    outcome
}

/// One picture as text.
fn picture(model: &mut Model, (columns, rows): (u16, u16)) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows))?;
    terminal.draw(|frame| view::draw(frame, model))?;
    let buffer = terminal.backend().buffer();
    let line = |row: u16| {
        let cells = (0..columns).map(|column| buffer[(column, row)].symbol());
        cells.collect::<String>().trim_end().to_owned()
    };
    let lines: Vec<String> = (0..rows).map(line).collect();
    Ok(lines.join("\n").trim_end().to_owned() + "\n")
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    client: &Client,
    model: &mut Model,
) -> anyhow::Result<()> {
    let mut next = Instant::now() + PERIOD;
    loop {
        terminal.draw(|frame| view::draw(frame, model))?;
        while event::poll(next.saturating_duration_since(Instant::now()))? {
            let asks = match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => {
                    let control = key.modifiers.contains(KeyModifiers::CONTROL);
                    match (key.code, control) {
                        (KeyCode::Char('q') | KeyCode::Esc, _) => return Ok(()),
                        (KeyCode::Char('c'), true) => return Ok(()),
                        (code, _) => press(model, code),
                    }
                }
                _ => false,
            };
            if asks {
                model.look(client);
            }
            terminal.draw(|frame| view::draw(frame, model))?;
        }
        model.look(client);
        next = Instant::now() + PERIOD;
    }
}

/// Takes a key; returns whether the server must be asked again.
fn press(model: &mut Model, code: KeyCode) -> bool {
    match code {
        KeyCode::Down | KeyCode::Char('j') => model.choose_volume(1),
        KeyCode::Up | KeyCode::Char('k') => model.choose_volume(-1),
        KeyCode::Char('w') | KeyCode::Right | KeyCode::Tab => {
            model.choose_window(1);
            return true;
        }
        KeyCode::Left | KeyCode::BackTab => {
            model.choose_window(-1);
            return true;
        }
        _ => {}
    }
    false
}
