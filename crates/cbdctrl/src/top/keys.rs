//! What keys mean.

use super::state::Action;
use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// The keys for people, with what each does.
pub const HELP: [(&str, &str); 9] = [
    ("Up Down j k", "select a device (on its page: the next one)"),
    ("Enter Right l", "the page of the selected device"),
    ("Esc Left h", "back"),
    ("s", "order of the rows: number, load, dirty, latency"),
    ("+ -", "a longer or shorter interval"),
    ("p", "pause and continue"),
    ("Ctrl-L", "draw everything again"),
    ("?", "this page"),
    ("q Ctrl-C", "end; Ctrl-Z suspends"),
];

/// What an event of the terminal asks for.
#[must_use]
pub fn action_of(event: &Event) -> Option<Action> {
    match event {
        Event::Key(key) if key.kind != KeyEventKind::Release => of_key(*key),
        Event::Resize(..) => Some(Action::Redraw),
        _ => None,
    }
}

fn of_key(key: KeyEvent) -> Option<Action> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c' | 'd') => Some(Action::Quit),
            KeyCode::Char('l') => Some(Action::Redraw),
            KeyCode::Char('z') => Some(Action::Suspend),
            _ => None,
        };
    }
    match key.code {
        KeyCode::Up | KeyCode::Char('k') => Some(Action::Move(-1)),
        KeyCode::Down | KeyCode::Char('j') => Some(Action::Move(1)),
        KeyCode::PageUp => Some(Action::Move(-10)),
        KeyCode::PageDown => Some(Action::Move(10)),
        KeyCode::Home | KeyCode::Char('g') => Some(Action::Move(i64::MIN)),
        KeyCode::End | KeyCode::Char('G') => Some(Action::Move(i64::MAX)),
        KeyCode::Enter | KeyCode::Right | KeyCode::Char('l') => Some(Action::Enter),
        KeyCode::Esc | KeyCode::Left | KeyCode::Backspace | KeyCode::Char('h') => Some(Action::Back),
        KeyCode::Char('s') => Some(Action::Sort),
        KeyCode::Char('?') => Some(Action::Help),
        KeyCode::Char('+' | '=') => Some(Action::Slower),
        KeyCode::Char('-' | '_') => Some(Action::Faster),
        KeyCode::Char('p' | ' ') => Some(Action::Pause),
        KeyCode::Char('q' | 'Q') => Some(Action::Quit),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pressed(code: KeyCode, modifiers: KeyModifiers) -> Option<Action> {
        action_of(&Event::Key(KeyEvent::new(code, modifiers)))
    }

    #[test]
    fn keys_have_their_actions() {
        let plain = |code| pressed(code, KeyModifiers::NONE);
        assert_eq!(plain(KeyCode::Char('q')), Some(Action::Quit));
        assert_eq!(plain(KeyCode::Down), plain(KeyCode::Char('j')));
        assert_eq!(plain(KeyCode::Up), Some(Action::Move(-1)));
        assert_eq!(plain(KeyCode::Enter), Some(Action::Enter));
        assert_eq!(plain(KeyCode::Esc), Some(Action::Back));
        assert_eq!(plain(KeyCode::Char('x')), None);
        assert_eq!(pressed(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Action::Quit));
        assert_eq!(pressed(KeyCode::Char('z'), KeyModifiers::CONTROL), Some(Action::Suspend));
        assert_eq!(pressed(KeyCode::Char('?'), KeyModifiers::SHIFT), Some(Action::Help));
        assert_eq!(action_of(&Event::Resize(3, 4)), Some(Action::Redraw));
    }

    #[test]
    fn a_key_that_is_released_does_nothing() {
        let released = KeyEvent::new_with_kind(KeyCode::Char('q'), KeyModifiers::NONE, KeyEventKind::Release);
        assert_eq!(action_of(&Event::Key(released)), None);
    }
}
