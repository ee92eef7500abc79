"""The mathematics: schedules, states, the process and its reverse (Eqs. 11 to 13), endings, keyed noise, masks."""
