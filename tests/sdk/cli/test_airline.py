"""The airline behind the demo."""

from __future__ import annotations

import pytest

from paceline.cli import airline


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(airline, "NETWORK_DELAY_S", 0.0)


def test_a_booking_is_found_by_the_code_in_the_question() -> None:
    """The tool reads the code from the customer's words and the rest from the database."""
    found = airline.get_reservation_details("Hello, booking KX4TRM. When do I leave?")
    assert (
        found
        == "flight NW 218 Oslo to Lisbon, leaves Friday 6 March at 09:40, Flex fare, changes without a fee"
    )
    assert "no booking" in airline.get_reservation_details("my booking is AAAAA1")
    assert "no booking" in airline.get_reservation_details("WHERE IS MY LUGGAGE")


def test_a_flight_is_found_by_its_first_city() -> None:
    """The search goes from the city named first."""
    assert "NW 219" in airline.search_flights("from Lisbon to Oslo")
    assert "NW 218" in airline.search_flights("Oslo to Lisbon please")
    assert airline.search_flights("to the moon") == "no flight was found"


def test_the_worked_examples_use_tools_that_exist() -> None:
    """Every tool is shown once at least, each call is answered, and no booking of the demo stands there."""
    messages = airline.conversation()
    calls = [call["function"]["name"] for each in messages for call in each.get("tool_calls", ())]
    assert set(calls) == set(airline.TOOLS)
    assert [each["name"] for each in messages if each["role"] == "tool"] == calls
    assert "KX4TRM" not in str(messages)
